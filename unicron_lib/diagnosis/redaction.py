"""What must not leave the cluster in a log's lines: keys, tokens, addresses, names of hosts, users and their paths."""

import re
from collections.abc import Iterable

_VALUE = r"[\"']?\s{0,2}[=:]\s{0,2}[\"']?"
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "key",
        re.compile(r"-----BEGIN [A-Z ]{1,40}-----.*|\b(?:AKIA|ASIA)[A-Z0-9]{12,20}\b|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"),
    ),
    ("key", re.compile(r"\b(?:sk|hf|ghp|gho|ghs|glpat|xox[abps]|wandb|pk|rk)[-_][A-Za-z0-9_-]{12,}")),
    ("key", re.compile(r"(?i)\b(?:bearer|basic)\s+[A-Za-z0-9+/._~=-]{8,}")),
    (
        "key",
        re.compile(
            r"(?i)\b[\w-]{0,40}(?:secret|token|passw(?:or)?d|api[-_]?key|access[-_]?key|credential|signature)[\w-]{0,40}"
            + _VALUE
            + r"[^\s\"',;&]{3,}"
        ),
    ),
    ("url", re.compile(r"\b[a-z][a-z0-9+.-]{1,12}://[^\s\"'<>)\]]+")),
    ("email", re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+\b")),
    (
        "ip",
        re.compile(
            r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{0,4}(?![\w:])"
        ),
    ),
    ("path", re.compile(r"(?<![\w/])/(?:home|Users|root|mnt|data|scratch|fsx|lustre|efs|nfs)/[^\s\"',:;)\]]*")),
    (
        "host",
        re.compile(r"\b(?:[a-z0-9][a-z0-9-]{0,62}\.){1,6}(?:internal|local|lan|com|net|org|io|cloud|cluster|ai|dev|edu)\b"),
    ),
    ("key", re.compile(r"(?<![\w/+])(?=[\w+/]{0,39}\d)(?=[\w+/]{0,39}[A-Za-z])[A-Za-z0-9+/]{40,}={0,2}")),
    (
        "host",
        re.compile(
            r"(?<!<)\b(?:ip|node|gpu|host|worker|compute|dgx|hgx|[a-z]{1,12}-[a-z]{1,12})-?[\w-]{0,24}\d{1,6}\b(?!\.(?:cpp|cc|cu|py|h)\b)"
        ),
    ),
)


class Redactor:
    """Replaces what is secret by names such as `<ip-1>`, the same thing by the same name in all lines."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}

    def clean(self, text: str) -> str:
        """The text without secrets. It rather takes too much than too little."""
        for what, pattern in _RULES:
            text = pattern.sub(lambda found, what=what: self._name(what, found[0]), text)  # type: ignore[misc]
        return text

    def clean_secrets(self, text: str) -> str:
        """The text without keys and tokens, but with names and addresses: for those who may see the cluster anyway."""
        for what, pattern in _RULES:
            if what == "key":
                text = pattern.sub(lambda found: self._name("key", found[0]), text)
        return text

    def clean_all(self, texts: Iterable[str]) -> list[str]:
        """The same of several."""
        return [self.clean(text) for text in texts]

    def _name(self, what: str, found: str) -> str:
        if found.startswith("<") and found.endswith(">"):
            return found
        taken = sum(1 for kind, _ in self._names if kind == what)
        return self._names.setdefault((what, found), f"<{what}-{taken + 1}>")
