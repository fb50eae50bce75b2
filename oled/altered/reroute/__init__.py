"""Rules that change routes: a block's tokens are made to share a pool of experts.

A rule is a pure function of one MoE layer of one forward of one block: the tokens' own experts and
weights and the router's scores in, a pool out; `inside` then routes every token within the pool.
The same functions serve a recorded trace (`reroute_trace`: cost only, since later hidden states
would differ) and a running model (`oled.running.rerouting`: text and quality).
"""

from oled.altered.reroute.change import RouteChange
from oled.altered.reroute.inside import route_inside
from oled.altered.reroute.rule import Reroute, Routed
from oled.altered.reroute.trace import reroute_trace

__all__ = ["Reroute", "RouteChange", "Routed", "reroute_trace", "route_inside"]
