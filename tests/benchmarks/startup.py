"""Start-up against a bare typer program: user + system CPU time, minimum of interleaved runs.

Run: python tests/benchmarks/startup.py [RUNS]. Exit status 3 if a ratio is above its bound.

The bare programs have the same typer, the same settings and as many commands. One prints a line; the other prints a
rich table. Interleaving and the minimum keep a busy machine from deciding.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# Byte code is cached, as for any installed program.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
COMMANDS = ("cache", "compare", "flops", "fit", "explain", "models", "variants", "devices")
BARE = """
import typer
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
{commands}
app()
"""
COMMAND = '@app.command()\ndef {name}(word: str = "x", number: int = 1) -> None:\n    """Say something."""\n{body}\n'
LINE = "    typer.echo('one line')"
TABLE = """\
    from rich.console import Console
    from rich.table import Table
    table = Table()
    table.add_column("a")
    table.add_row("b")
    Console().print(table)"""


def cpu_seconds(words: list[str]) -> float:
    """User and system time of one run."""
    with Path(os.devnull).open("w") as sink:
        process = subprocess.Popen(words, stdout=sink, env=ENVIRONMENT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{words}: status {status}")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure and print the ratios."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    with tempfile.TemporaryDirectory() as folder:
        programs = {}
        for name, body in (("line", LINE), ("table", TABLE)):
            path = Path(folder) / f"{name}.py"
            path.write_text(BARE.format(commands="\n".join(COMMAND.format(name=c, body=body) for c in COMMANDS)))
            programs[name] = [sys.executable, str(path)]
        ours = [sys.executable, "-m", "attncalc"]
        jobs = {
            "bare": [*programs["line"], "cache"],
            "bare --help": [*programs["line"], "--help"],
            "bare table": [*programs["table"], "cache"],
            "--help": [*ours, "--help"],
            "cache --json": [*ours, "cache", "--model", "deepseek-v3", "--json"],
            "cache": [*ours, "cache", "--model", "deepseek-v3"],
        }
        best = dict.fromkeys(jobs, float("inf"))
        for words in jobs.values():
            cpu_seconds(words)
        for _ in range(runs):
            for name, words in jobs.items():
                best[name] = min(best[name], cpu_seconds(words))
    failed = False
    for name, base, bound in (("--help", "bare", 1.3), ("cache --json", "bare", 1.8), ("cache", "bare table", 1.5)):
        ratio = best[name] / best[base]
        failed |= ratio > bound
        print(
            f"{name:13} {best[name] * 1e3:6.1f} ms  {ratio:4.2f}x of `{base}` {best[base] * 1e3:.1f} ms, bound {bound}x"
        )
    return 3 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
