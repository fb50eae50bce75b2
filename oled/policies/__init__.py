"""Policies decide what stays on the GPU and where a miss is computed; they move nothing."""
