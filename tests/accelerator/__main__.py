"""`python -m tests.accelerator`: every kind of plan on stand-in accelerators, against one of them.

python -m tests.accelerator                 # all on 2 ranks
python -m tests.accelerator tp=2 pp=2       # some
"""

import sys
import time

from tests.parity.pool import Pool

from . import jobs, stand_in

PLANS = (
    "dp=2", "tp=2", "sp=2", "zero1=2", "zero2=2", "zero3=2", "pp=2", "cp=2", "cp_all_gather=2", "ulysses=2", "ep=2"
)  # fmt: skip


def main(plans: list[str]) -> int:
    stand_in.build()
    pool, failed = Pool(2, prepare=stand_in.prepare), 0
    for plan in plans or PLANS:
        began = time.monotonic()
        try:
            passed, report = pool.run(jobs.check_plan, plan, {}, timeout=600)[0]
        except Exception as error:
            passed, report = False, "\n".join([repr(error), *getattr(error, "__notes__", [])])
        failed += not passed
        print(f"{plan:18} {'ok' if passed else 'FAILED'} {time.monotonic() - began:.0f} s", flush=True)
        if not passed:
            print(report, flush=True)
    pool.close()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
