"""``python -m atoll``, and with it ``torchrun --nproc-per-node N -m atoll join INVITE``."""

from deploy.cli import main

if __name__ == "__main__":
    main()
