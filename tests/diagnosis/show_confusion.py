"""Print accuracy and confusion matrix: `python tests/diagnosis/show_confusion.py [dev|held_out|reserve|learnt|unseen]`."""

import sys

from labelled import cases
from score import answers, report

if __name__ == "__main__":
    sys.stdout.write(report(answers(cases(sys.argv[1] if len(sys.argv) > 1 else "held_out"))) + "\n")
