"""Lines that name a fault without telling of one, and lines that tell that a job goes on. Pure."""

import re

_HEAD = 1000
"""Characters of a line in which its step is told."""

_MILD = re.compile(
    r"(?:^|[\s\[\]|=\"'(:,])(?:INFO|DEBUG|TRACE|INF|DBG)(?:[\s\]|\"':,)]|$)|"
    r"(?:^|[\[\]|=\"'(:,\dZ] ?|\t)(?:info|debug)(?:[\s\]|\"':,)]|$)|\s(?:info|debug)[\]|\"':)\t]"
)
_WARNS = re.compile(
    r"(?:^|[\s\[|(\"])(?:WARN(?:ING)?|[Ww]arning|WRN)(?:[\s\]|\":,)]|$)|\[W\d{0,4}[ :]|^W\d{4} |\w{2,40}Warning: "
)
_MILD_FIELD = re.compile(r'"(?:level|levelname|severity|lvl)" ?: ?"(?:INFO|DEBUG|info|debug)"')
_RETRIED = re.compile(
    r"\b[Rr]etry(?:ing)?\b(?! limit| budget| count exceeded)[^\n]{0,80}?(?:\bin\b|\bafter\b|attempt|\d|\.\.\.|backoff)|"
    r"\b[Rr]etrying\b|[Ww]ill (?:be )?(?:retr(?:y|ied)|reconnect|try again)|[Tt]rying again|still trying|"
    r"(?:[Aa]ttempt|[Tt]ry|retry) #?\d{1,4} ?(?:/|of) ?\d{1,4}|[Ss]ucceeded (?:after|on|at)|\brecovered\b|"
    r"[Rr]econnected|back to normal|\bre-?established\b|\b[Bb]ack(?:ing|ed)? ?off\b"
)
_WORKED = re.compile(
    r"\b(?:ok|OK|[Ss]uccess(?:ful(?:ly)?)?|[Ss]ucceeded|[Cc]ompleted|[Dd]one|[Ff]inished|[Uu]ploaded|[Dd]ownloaded|[Ss]aved|"
    r"[Ww]ritten|[Rr]ecovered|[Rr]econnected|[Rr]estored|[Cc]onnected|[Ww]orked)\b[^\n]{0,60}"
    r"\b(?:retr(?:y|ies)|tries|[Aa]ttempts?|try)\b|"
    r"\b(?:retr(?:y|ies)|tries|[Aa]ttempts?|try)\b[^\n]{0,40}"
    r"\b(?:ok|OK|success(?:ful(?:ly)?)?|succeeded|worked|passed|uploaded|completed|done)\b|"
    r"\b(?:[Rr]econnected|[Rr]ecovered|re-?established|back to normal|reachable again|is back|"
    r"[Bb]acking off\b[^\n]{0,80} uploaded)\b"
)
_FAILED = re.compile(
    r"\b(?:[Nn]ot|[Nn]o|[Ff]ail\w{0,6}|[Uu]nable|[Cc]annot|[Uu]nsuccessful\w{0,2}|could ?n['o]t|[Ww]ithout|never)\b"
)
_GAVE_UP = re.compile(r"\b(?:exceed(?:ed|s)|exhausted|[Gg]iving up|gave up|reached max|no more retries|[Aa]bort(?:ed|ing))\b")
_NEGATED = re.compile(
    r"\b(?:[Nn]o|0|zero|without(?: any)?) (?:\w{1,24} ){0,3}(?:errors?|failures?|faults?|NaNs?|OOMs?|violations?)\b|"
    r"(?:errors?|count|failures?|rate|nan\w{0,12})(?:_total)?\"?\s{0,3}[=:]\s{0,3}\"?0(?:\.0{1,9})?\b|"
    r"\b(?:errors?|failures?)\b[^\n=:]{0,24}[=:] {0,3}0\b|"
    r"\b(?:handlers?|watchers?|listeners?|pollers?|monitor|hooks?|callbacks?)\b[^\n]{0,40}\b(?:start|enabl|regist|install)|"
    r"\b(?:[Rr]egister|[Ii]nstall|[Ee]nabl|[Ww]atch|[Ll]isten|poll)ing\b|"
    r"^wandb: |\bW&B API\b|\bmlflow\b|"
    r"\b[Nn]o (?:\w{1,24} ){0,3}(?:notices?|events?|interruptions?)\b|"
    r"IPv6 network addresses of [^\n]{1,200} cannot be retrieved|"
    r"\bsimulat(?:ed|ing)\b|\bunit test\b|\bdry.run\b|\b[Ss]elf.test passed\b"
)
_CORRECTED = re.compile(r"\b[Cc]orrect(?:ed|able)\b(?! \(Fatal)")
_UNCORRECTED = re.compile(r"[Uu]n-?[Cc]orrect")


def is_mild(text: str) -> bool:
    """Whether the line is told as mere information, which few faults are."""
    return _MILD.search(text[:160]) is not None or _MILD_FIELD.search(text) is not None


def is_warning(text: str) -> bool:
    """Whether the line is told as a warning."""
    return _WARNS.search(text[:160]) is not None


def is_retried(text: str) -> bool:
    """Whether the line tells of something that failed and is tried again."""
    return _RETRIED.search(text) is not None


def is_harmless(text: str) -> bool:
    """Whether the line tells of something that is tried again, was corrected, or did not happen."""
    if _NEGATED.search(text) or (_RETRIED.search(text) and not _GAVE_UP.search(text)):
        return True
    return _CORRECTED.search(text) is not None and not _UNCORRECTED.search(text)


def has_recovered(text: str) -> bool:
    """Whether the line tells that what had failed worked when it was tried again."""
    return _WORKED.search(text) is not None and not _FAILED.search(text) and not _GAVE_UP.search(text)


_COUNTERS = (
    r"(?:[Gg]lobal[_ ]?[Ss]tep|[Tt]rain(?:ing)?[_ /]?[Ss]tep|trainer/global_step|[Ss]teps?|STEP|[Ii]ter(?:ation)?s?|ITER|it|"
    r"[Bb]atch(?:es)?(?:_idx)?|num_updates|[Uu]pdates?|[Ee]poch|EPOCH|[Ee]p|[Tt]rain(?:ing)?)"
)
STEP = rf"(?<![\w/]){_COUNTERS}[\"']?(?: ?[=:#|]| \[| no\.?)? {{0,8}}[\[(]? {{0,8}}(?P<step>\d{{1,12}})\b(?!:\d\d)"
"""How all sorts of programs tell the number of a step."""
MEASURED = (
    r"(?<![a-z])(?:loss|lr|ppl|perplexity|tokens|tok|tps|wps|mfu|tflops|throughput|samples|imgs|grad_?norm|gnorm|elapsed|eta|"
    r"[ms]s/(?:it|step|iter)|step_time|iter_time|learning_rate|it/s|s/it|acc(?:uracy)?|sec|ms|time)(?![a-z])"
)
"""What they tell besides."""
_STEP, _MEASURED = re.compile(STEP), re.compile(MEASURED, re.IGNORECASE)
_FRACTION = re.compile(r"\b(?P<step>\d{1,9})/\d{1,9} \[\d{1,4}:\d\d(?::\d\d)?<[^\]\n]{1,40}(?:it/s|s/it)")
_METRICS = re.compile(r"\{['\"](?:loss|train_loss)['\"]: ['\"]?-?\d")
_NO_STEP = re.compile(
    r"error(?![_/ ]rate)|fail|fatal|exception|time[ds]?[ _-]?out|abort|kill|retr[yi]|stall|hang|hung|cancel|stuck|waiting|"
    r"spike|traceback|resum|load|restor|start(?:ing|s) |from (?:step|iter|checkpoint)|valid|eval|overflow|skipping|diverge|"
    r"anomal|no heartbeat|did not|refused|reset|unreachable|preempt|signal|warn",
    re.IGNORECASE,
)
"""Words of lines that name a step for another reason than to tell that it is done."""
_OF_MEGATRON = re.compile(
    r"\biteration:?\s{1,12}(?P<step>\d{1,9}) ?/ {0,12}\d{1,9}\b|"
    r"\b(?:[Ss]tep|[Ii]ter(?:ation)?|global_step)s?[ =:#]{1,4}\d{1,9}\b[^\n]{0,120}"
    r"\b(?:loss|lr|tokens|tok/s|throughput|mfu|ms|samples)"
)
_NOT_FINITE = re.compile(
    r"\bloss[\"'\])]{0,2}\s{0,3}[=:|]?\s{0,12}-?(?:nan|inf(?:inity)?)\b|"
    r"\b(?:grad[ _-]?norm|gnorm)[\"'\])]{0,2}\s{0,3}[=:|]?\s{0,12}-?(?:nan|inf)\b",
    re.IGNORECASE,
)
_DONE = re.compile(
    r"\[?after training is done\]?|[Tt]raining (?:is |has )?(?:done|finished|complete(?:d)?)\b|"
    r"(?:[Jj]ob|[Rr]un|[Pp]rocess(?:es)?|[Ww]orkers?|[Tt]raining|[Ww]orker group)[^\n]{0,40} "
    r"(?:(?:completed|finished|succeeded|ended) successfully|successfully finished)\b|"
    r"`?Trainer\.fit`? stopped: `?max_\w{4,6}|['\"]train_runtime['\"]: |exits successfully\b|"
    r"[Ee]xit(?:ed|ing)?(?: with)?(?: exit)? ?(?:code|status):? ?0\b"
)


def step_of(text: str) -> int | None:
    """The number that a line gives the step it tells of, if any."""
    found = (it["step"] for pattern in (_OF_MEGATRON, _FRACTION, _STEP) if (it := pattern.search(text)) and it["step"])
    return next(map(int, found), None)


def is_progress(text: str) -> bool:
    """Whether the line tells of an iteration that was done, with a finite loss if with any."""
    text = text[:_HEAD]
    told = _OF_MEGATRON.search(text) or _FRACTION.search(text) or _METRICS.search(text) or _is_step(text)
    return bool(told) and not _NOT_FINITE.search(text)


def _is_step(text: str) -> bool:
    return bool(_STEP.search(text) and _MEASURED.search(text) and not _NO_STEP.search(text))


_HEALED = {"nfs-silent": re.compile(r"nfs: server \S{1,128} OK")}


def healed_by(text: str) -> str | None:
    """The name of the rule whose trouble the line tells to be over."""
    return next((name for name, pattern in _HEALED.items() if pattern.search(text)), None)


def is_done(text: str) -> bool:
    """Whether the line tells that the job came to its end."""
    return _DONE.search(text) is not None
