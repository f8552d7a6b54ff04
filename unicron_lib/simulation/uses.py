"""What a GPU-second is used for: training, or one of the types of badput of Google's ml-goodput-measurement."""

from enum import StrEnum


class Use(StrEnum):
    """TRAINING is goodput; what follows it is badput by type; the last two are no job's: a GPU out of use, or idle."""

    TRAINING = "training"
    ACCELERATOR_INITIALIZATION = "accelerator_initialization"
    TRAINING_PREP = "training_prep"
    PROGRAM_STARTUP = "program_startup"
    DATA_LOADING_SYNC = "data_loading_sync"
    DATA_LOADING_ASYNC = "data_loading_async"
    UNPRODUCTIVE_CHECKPOINT_SAVE_TIME = "unproductive_checkpoint_save_time"
    UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME = "unproductive_checkpoint_restore_time"
    WASTED_PROGRESS_FROM_DISRUPTION = "wasted_progress_from_disruption"
    INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION = "infrastructure_recovery_from_disruption"
    CUSTOM_BADPUT_EVENTS = "custom_badput_events"
    OTHER = "other"
    ELASTIC_SLICE_DOWN = "elastic_slice_down"
    ELASTIC_SCALE_UP = "elastic_scale_up"
    ELASTIC_REINITIALIZATION = "elastic_reinitialization"
    OUT_OF_USE = "out_of_use"
    IDLE = "idle"


NOT_BADPUT = frozenset({Use.TRAINING, Use.OUT_OF_USE, Use.IDLE})
