"""Faults while ranks run.

`watch.py` reports a failure to the other ranks; `flight_recorder.py` and `hang_report.py` name the collective that
ranks wait in; `nonfinite.py` finds the op that made a NaN; `replicas.py` finds replicas that have drifted apart;
`input_comparison.py` finds ranks that pass different batches; `signals.py` turns signals into a clean stop.
"""
