"""`make bench`: every timed comparison. Each prints ratios within one run; absolute times depend on the machine."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from pathlib import Path

BENCHMARKS = ("bench_apply", "bench_recon")


def main() -> None:
    """Run all benchmarks, or those named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=f"any of {', '.join(BENCHMARKS)}")
    chosen = parser.parse_args().names
    unknown = sorted(set(chosen) - set(BENCHMARKS))
    if unknown:
        sys.exit(f"no benchmark is called {', '.join(unknown)}")
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}")
    sys.path.insert(0, str(Path(__file__).parent))
    for name in chosen:
        print(f"\n== {name}", flush=True)
        importlib.import_module(name).main()


if __name__ == "__main__":
    main()
