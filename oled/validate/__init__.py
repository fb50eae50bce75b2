"""A live run beside the simulation of the same routing: same decisions, same outputs, same times.

`pace` makes the costs that both sides get, `judge` has the definitions and gates, `run` the runs.
"""
