"""Which generations of a job a node still obeys: pure, no clock, no I/O."""


class Fence:
    """The oldest generation of each job that may still act here; it never goes back."""

    def __init__(self) -> None:
        self._oldest: dict[str, int] = {}

    def oldest(self, job: str) -> int:
        """The oldest generation of `job` that is still obeyed, 0 for a job never heard of."""
        return self._oldest.get(job, 0)

    def admits(self, job: str, generation: int) -> bool:
        """Whether `generation` may act."""
        return generation >= self.oldest(job)

    def raise_to(self, job: str, generation: int) -> None:
        """From here on refuse every generation below `generation`."""
        self._oldest[job] = max(self.oldest(job), generation)

    def refusal(self, job: str, generation: int) -> str:
        """The sentence for a command that is not admitted."""
        return (
            f"generation {generation} of job {job} has been replaced: generation {self.oldest(job)} is the oldest one that "
            "this node obeys; read the journal again and go on with the newest plan"
        )
