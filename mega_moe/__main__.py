"""`python3 -m mega_moe ...` is `mega-moe ...`, also from a bare checkout."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
