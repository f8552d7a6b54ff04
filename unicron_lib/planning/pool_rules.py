"""What a live cluster knows of its pools: prices, reliabilities, the budget and quotas; from a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from unicron_lib.errors import UserError

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPrice:
    """A pool's price, and the mean time between failures or reclaims of one of its GPUs; None: that of the cluster."""

    dollars_per_gpu_h: NotNegative = 0.0
    mtbf_gpu_s: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """What is known of pools by name, and the limits: dollars an hour in all (None: no limit), GPUs by tenant."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    pools: Mapping[str, PoolPrice] = field(default_factory=dict)
    budget_dollars_per_h: NotNegative | None = None
    quotas_gpus: Mapping[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)

    @property
    def budget(self) -> float:
        """Dollars an hour, infinite without a limit."""
        return inf if self.budget_dollars_per_h is None else self.budget_dollars_per_h


ALIKE = PoolRules()
_rules: TypeAdapter[PoolRules] = TypeAdapter(PoolRules)


def load(path: Path) -> PoolRules:
    """Read the file. Raises UserError with one sentence that names the file and the key."""
    try:
        return _rules.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(str(part) for part in found["loc"]) or "the file"
        raise UserError(f"{path}: {key}: {found['msg'][0].lower()}{found['msg'][1:]}") from error
