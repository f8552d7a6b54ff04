"""Who pays for a job that goes on with other than its normal size: the failure that has made it so."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Charges:
    """The `normal` size of each job in GPUs, and which cause a job of another size is `charged` to."""

    normal: dict[str, int] = field(default_factory=dict)
    charged: dict[str, str] = field(default_factory=dict)

    def resized(self, job: str, cause: str) -> None:
        """The answer to the failure `cause` has changed the job's size."""
        self.charged[job] = cause

    def due(self, job: str, num_gpus: int, *, is_whole: bool) -> str:
        """The cause that a job of `num_gpus` is charged to, "" if none.

        What it has while nothing is charged and the cluster `is_whole`, without a node that is away, is normal.
        """
        cause = self.charged.get(job, "")
        if not cause and is_whole:
            self.normal[job] = num_gpus
        self.charged[job] = cause if num_gpus != self.normal.get(job) else ""
        return self.charged[job]
