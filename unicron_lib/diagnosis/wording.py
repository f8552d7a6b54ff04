"""What stands around the words of a log's line, and lines that name a fault without telling of one. Pure."""

import re

LOOK_AT = 2000
"""Characters of a line that are looked at; a longer one is cut."""

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]|\x1b[()][A-Z0-9]")
_WHO = re.compile(r"\[?(?:default|rank|Rank )\d{1,6}\]?:[ ]?|\d{1,5}: |\([\w.-]{1,64} pid=\d{1,10}[^)]{0,64}\) ")
_WHEN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,\d]{0,12}(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?")


def parted(text: str) -> tuple[str, str]:
    """Who said a line, as launchers label a rank's words, and the line without colours, times and that; still indented."""
    text = text[:LOOK_AT].rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        text = text.rpartition("\r")[2]
    who = ""
    if when := _WHEN.match(text):
        text = text[when.end() :]
    while label := _WHO.match(text):
        who, text = who + label[0], text[label.end() :]
    return who, text


_MILD = re.compile(r"(?:^|[\s\[\]|=\"'(:,])(?:INFO|DEBUG|info|debug|TRACE)(?:[\s\]|\"':,)]|$)")
_RETRIED = re.compile(
    r"\b[Rr]etry(?:ing)?\b(?! limit| budget| count exceeded)[^\n]{0,80}?(?:\bin\b|\bafter\b|attempt|\d|\.\.\.|backoff)|"
    r"\b[Rr]etrying\b|[Ww]ill (?:be )?(?:retr(?:y|ied)|reconnect|try again)|[Tt]rying again|still trying|"
    r"(?:[Aa]ttempt|[Tt]ry|retry) #?\d{1,4} ?(?:/|of) ?\d{1,4}|[Ss]ucceeded (?:after|on|at)|\brecovered\b|"
    r"[Rr]econnected|back to normal|\bre-?established\b"
)
_GAVE_UP = re.compile(r"\b(?:exceed(?:ed|s)|exhausted|[Gg]iving up|gave up|reached max|no more retries|[Aa]bort(?:ed|ing))\b")
_NEGATED = re.compile(
    r"\b(?:[Nn]o|0|zero|without(?: any)?) (?:\w{1,24} ){0,3}(?:errors?|failures?|faults?|NaNs?|OOMs?|violations?)\b|"
    r"(?:errors?|count|failures?|rate|nan\w{0,12})(?:_total)?\"?\s{0,3}[=:]\s{0,3}\"?0(?:\.0{1,9})?\b|"
    r"\b(?:errors?|failures?)\b[^\n=:]{0,24}[=:] {0,3}0\b|"
    r"\b(?:handlers?|watchers?|listeners?|pollers?|monitor|hooks?|callbacks?)\b[^\n]{0,40}\b(?:start|enabl|regist|install)|"
    r"\b(?:[Rr]egister|[Ii]nstall|[Ee]nabl|[Ww]atch|[Ll]isten|poll)ing\b|"
    r"\bsimulat(?:ed|ing)\b|\bunit test\b|\bdry.run\b|\b[Ss]elf.test passed\b"
)
_CORRECTED = re.compile(r"\b[Cc]orrect(?:ed|able)\b(?! \(Fatal)")
_UNCORRECTED = re.compile(r"[Uu]n-?[Cc]orrect")


def is_mild(text: str) -> bool:
    """Whether the line is told as mere information, which few faults are."""
    return _MILD.search(text[:160]) is not None


def is_harmless(text: str) -> bool:
    """Whether the line tells of something that is tried again, was corrected, or did not happen."""
    if _NEGATED.search(text) or (_RETRIED.search(text) and not _GAVE_UP.search(text)):
        return True
    return _CORRECTED.search(text) is not None and not _UNCORRECTED.search(text)


_PROGRESS = re.compile(
    r"\biteration:?\s{1,12}\d{1,9} ?/ {0,12}\d{1,9}\b|"
    r"\b(?:[Ss]tep|[Ii]ter(?:ation)?|global_step)s?[ =:#]{1,4}\d{1,9}\b[^\n]{0,120}"
    r"\b(?:loss|lr|tokens|tok/s|throughput|mfu|ms|samples)|"
    r"\{'(?:loss|train_loss)': -?\d|"
    r"\b\d{1,9}/\d{1,9} \[\d{1,4}:\d\d(?::\d\d)?<[^\]\n]{1,40}(?:it/s|s/it)"
)
_NOT_FINITE = re.compile(r"\bloss[\"'=: ]{1,6}-?(?:nan|inf)\b|\bgrad[ _]norm[\"'=: ]{1,6}nan\b", re.IGNORECASE)
_DONE = re.compile(
    r"\[?after training is done\]?|[Tt]raining (?:is |has )?(?:done|finished|complete(?:d)?)\b|"
    r"(?:[Jj]ob|[Rr]un|[Pp]rocess(?:es)?|[Ww]orkers?|[Tt]raining)[^\n]{0,40} "
    r"(?:completed|finished|succeeded|ended) successfully\b|"
    r"[Ee]xit(?:ed|ing)?(?: with)?(?: exit)? ?(?:code|status):? ?0\b"
)


def is_progress(text: str) -> bool:
    """Whether the line tells of an iteration that was done, with a finite loss if with any."""
    return _PROGRESS.search(text) is not None and not _NOT_FINITE.search(text)


_HEALED = {"nfs-silent": re.compile(r"nfs: server \S{1,128} OK")}


def healed_by(text: str) -> str | None:
    """The name of the rule whose trouble the line tells to be over."""
    return next((name for name, pattern in _HEALED.items() if pattern.search(text)), None)


def is_done(text: str) -> bool:
    """Whether the line tells that the job came to its end."""
    return _DONE.search(text) is not None
