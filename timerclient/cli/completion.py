"""`timerctl completion SHELL`: a script that completes commands and options; made by shtab."""

import argparse
from typing import Final

from timerclient.cli.cli_args import Commands
from timerclient.cli.cli_errors import OK
from timerclient.values.errors import TimerError

SHELLS: Final = ("bash", "zsh", "fish")
_EXAMPLES: Final = """\
examples:
  timerctl completion bash > ~/.local/share/bash-completion/completions/timerctl
  timerctl completion zsh > "${fpath[1]}/_timerctl"
  timerctl completion fish > ~/.config/fish/completions/timerctl.fish
"""


class CompletionCommands(Commands):
    """The command `completion`."""

    def register_completion(self, parser: argparse.ArgumentParser, _: object) -> None:
        """Add the arguments to the parser of `completion`."""
        parser.epilog = f"{_EXAMPLES}\n{parser.epilog}"
        parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
        parser.set_defaults(run=self._print)

    def _print(self, args: argparse.Namespace) -> int:
        try:
            import shtab
        except ModuleNotFoundError as error:
            raise TimerError("completion needs shtab: pip install shtab") from error
        from timerclient.cli.timerctl import make_parser  # which loads this module late

        script = shtab.complete(make_parser(), shell=args.shell)
        self._put(args, {"shell": args.shell, "script": script}, script.rstrip("\n"))
        return OK
