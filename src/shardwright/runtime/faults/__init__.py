"""What can go wrong while ranks run: `watch.py` tells the other ranks of a failure, `flight_recorder.py` and
`hang_report.py` name the collective that ranks wait in, `nonfinite.py` the op that made a NaN, `replicas.py` values
that have drifted apart, `input_comparison.py` ranks that pass different batches, `signals.py` requests to stop.
"""
