"""What Triton's log says of its end, in one sentence."""

import re
from pathlib import Path


def failure_in_log(log_file: Path, *, since: int = 0) -> str:
    """One sentence on why the server ended, with the log's path; only what was logged after byte `since` counts."""
    try:
        text = log_file.read_bytes()[since:].decode(errors="replace")
    except OSError:
        return f"its log {log_file} cannot be read."
    reasons = re.findall(r"failed to load '\w+' version \d+: (?:\w+: )?(.+)", text) or re.findall(
        r"(?m)^error: (.+)", text
    )
    own = [match for reason in reasons for match in re.findall(r"(?:EngineMismatch|ConfigError): (.+)", reason)]
    # Triton logs a Python error with its traceback in one line, line ends as two characters.
    reason = (own or reasons or ["no reason was logged"])[0].split("\\n")[0].strip().rstrip(".")
    return f"{reason}. Its log is {log_file}."
