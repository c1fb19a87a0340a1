"""From exported nodes to an `ir.Graph`.

`convert.py` goes through the nodes once and fills a `GraphBuilder`; `aliases.py` and `in_place_ops.py` make writes
functional, `canonical.py` gives each thing one spelling, `leaves.py` and `call_paths.py` name what goes in and
out, `finish.py` joins repeated constants, drops what is dead, and `value_names.py`
names the rest.
"""
