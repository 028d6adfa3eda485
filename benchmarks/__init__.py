"""Measurements beside peers, interleaved in one run; `make bench` runs them."""
