"""How many architectures of transformers shardwright compiles, and whether the programs are right.

listed.py          which model classes there are, one for each model type
configs.py         a small config of any config class, by the names of its attributes
exceptions.py      what names alone don't tell, as data
inputs.py          a small batch for any model, with and without labels
measure.py         one row: capture, dp=2, tp=2, the share of arithmetic that tp splits
pool.py            rows in worker processes, so that a crash or a hang costs one row
page.py            the results as a page of the docs
"""
