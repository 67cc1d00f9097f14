"""What `dflash-mlx launch` starts on each machine: a command, and for rank 0 the input of `launch`.

MLX's launcher passes on what it reads, but neither Ctrl-C nor the end of its input. `launch` sends both as characters.
Rank 0 takes them out here; where ssh has started it, ssh's terminal does that.
"""

import os
import re
import signal
import sys
import threading

from dflash_mlx.cli import app
from dflash_mlx.cli.launch import END, INTERRUPT


def main() -> int:
    """Run the command in `sys.argv`; returns its exit code."""
    if os.environ.get("MLX_RANK") == "0" and not os.isatty(0):
        given, (reading, writing) = os.dup(0), os.pipe()
        os.dup2(reading, 0)
        os.close(reading)
        threading.Thread(target=_pass_on, args=(given, writing), daemon=True).start()
    return app.main()


def _pass_on(given: int, writing: int) -> None:
    """Write what comes from the launcher to this process's stdin; when the launcher is gone, end the process."""
    ended = False
    while data := os.read(given, 4096):
        for part in re.split(b"([\x03\x04])", data):
            if part == INTERRUPT:
                os.kill(os.getpid(), signal.SIGINT)
            elif not ended and part == END:
                ended = True
                os.close(writing)
            elif not ended and part:
                os.write(writing, part)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
