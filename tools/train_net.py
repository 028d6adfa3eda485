"""A training script with LiBai's arguments, for `tools/train.sh` and as a beginning for one's own:

python tools/train_net.py --config-file CONFIG [--resume] [--eval-only] [--fast-dev-run] [key=value …]
"""

from __future__ import annotations

import argparse
import sys

from dufu import train
from dufu.errors import DufuError


def main() -> int:
    """Train as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description="Train a model.")
    parser.add_argument("--config-file", required=True, help="a recipe's name, a .py or a .yaml file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the newest checkpoint")
    parser.add_argument("--fast-dev-run", action="store_true", help="20 steps, evaluation every 10")
    parser.add_argument("--data", action="append", help="a file, instead of the config's; may be repeated")
    parser.add_argument("overrides", nargs="*", help="key=value settings")
    given = parser.parse_intermixed_args()
    try:
        outcome = train(
            given.config_file,
            given.overrides,
            data=given.data or (),
            resume=given.resume,
            eval_only=given.eval_only,
            fast_dev_run=given.fast_dev_run,
        )
    except DufuError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 128 + outcome.signal if outcome.signal else 0


if __name__ == "__main__":
    sys.exit(main())
