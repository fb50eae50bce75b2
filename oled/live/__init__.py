"""The executor: offloaded experts driven by the same decisions as the simulator's.

`store` holds all experts in host memory, `slots` those on the device, `executor` runs one
layer-step, `backends` do the copies and the arithmetic. `hooks` puts the executor under a
transformers model, `replay` under the routing of a trace.
"""
