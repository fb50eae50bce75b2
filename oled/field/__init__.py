"""Predict what people measured: a row of a table to a scenario, a scenario to time on the clock."""
