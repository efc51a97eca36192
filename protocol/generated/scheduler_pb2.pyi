from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "fenced", "drained", "restored", "ready", "block_status", "attempt_done", "amended", "settled", "saved", "evaluation_done", "failed", "cut_off", "attempt_heard", "pinned", "mirrored")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATUS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_DONE_FIELD_NUMBER: _ClassVar[int]
    AMENDED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_HEARD_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    fenced: Fenced
    drained: Drained
    restored: Restored
    ready: Ready
    block_status: BlockStatus
    attempt_done: AttemptDone
    amended: Amended
    settled: Settled
    saved: Saved
    evaluation_done: EvaluationDone
    failed: Failed
    cut_off: CutOff
    attempt_heard: AttemptHeard
    pinned: Pinned
    mirrored: Mirrored
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., restored: _Optional[_Union[Restored, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., block_status: _Optional[_Union[BlockStatus, _Mapping]] = ..., attempt_done: _Optional[_Union[AttemptDone, _Mapping]] = ..., amended: _Optional[_Union[Amended, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., evaluation_done: _Optional[_Union[EvaluationDone, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., cut_off: _Optional[_Union[CutOff, _Mapping]] = ..., attempt_heard: _Optional[_Union[AttemptHeard, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ..., mirrored: _Optional[_Union[Mirrored, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("run_id", "member", "pid", "epoch", "data_endpoint", "nonce", "machine", "peers", "facts")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    member: str
    pid: int
    epoch: int
    data_endpoint: str
    nonce: int
    machine: str
    peers: Peers
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, run_id: _Optional[str] = ..., member: _Optional[str] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., data_endpoint: _Optional[str] = ..., nonce: _Optional[int] = ..., machine: _Optional[str] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, members: _Optional[_Iterable[str]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "activity", "waiting", "progress")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    activity: str
    waiting: bool
    progress: int
    def __init__(self, sequence: _Optional[int] = ..., activity: _Optional[str] = ..., waiting: _Optional[bool] = ..., progress: _Optional[int] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("member", "pid", "death")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEATH_FIELD_NUMBER: _ClassVar[int]
    member: str
    pid: int
    death: str
    def __init__(self, member: _Optional[str] = ..., pid: _Optional[int] = ..., death: _Optional[str] = ...) -> None: ...

class MemoryState(_message.Message):
    __slots__ = ("incarnation", "committed", "generation", "lost_attempt", "tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    committed: int
    generation: int
    lost_attempt: int
    tokens: bytes
    def __init__(self, incarnation: _Optional[int] = ..., committed: _Optional[int] = ..., generation: _Optional[int] = ..., lost_attempt: _Optional[int] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("incarnation", "committed", "attempt", "complete", "tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    committed: int
    attempt: int
    complete: bool
    tokens: bytes
    def __init__(self, incarnation: _Optional[int] = ..., committed: _Optional[int] = ..., attempt: _Optional[int] = ..., complete: _Optional[bool] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("epoch", "memory", "replica")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    memory: MemoryState
    replica: ReplicaState
    def __init__(self, epoch: _Optional[int] = ..., memory: _Optional[_Union[MemoryState, _Mapping]] = ..., replica: _Optional[_Union[ReplicaState, _Mapping]] = ...) -> None: ...

class Restored(_message.Message):
    __slots__ = ("epoch", "incarnation", "damaged")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: int
    damaged: str
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., damaged: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class BlockStatus(_message.Message):
    __slots__ = ("epoch", "attempt", "block", "finite", "sum_squares", "seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    SUM_SQUARES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    block: int
    finite: bool
    sum_squares: float
    seconds: float
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., block: _Optional[int] = ..., finite: _Optional[bool] = ..., sum_squares: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class AttemptHeard(_message.Message):
    __slots__ = ("epoch", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("counted", "right", "margin_sum")
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    MARGIN_SUM_FIELD_NUMBER: _ClassVar[int]
    counted: int
    right: int
    margin_sum: float
    def __init__(self, counted: _Optional[int] = ..., right: _Optional[int] = ..., margin_sum: _Optional[float] = ...) -> None: ...

class AttemptDone(_message.Message):
    __slots__ = ("epoch", "attempt", "loss_sum", "loss_tokens", "busy_seconds", "wall_seconds", "peak_device_bytes", "tail_seconds", "device_limit_bytes", "pairs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    loss_sum: float
    loss_tokens: int
    busy_seconds: float
    wall_seconds: float
    peak_device_bytes: int
    tail_seconds: float
    device_limit_bytes: int
    pairs: Pairs
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., loss_sum: _Optional[float] = ..., loss_tokens: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., wall_seconds: _Optional[float] = ..., peak_device_bytes: _Optional[int] = ..., tail_seconds: _Optional[float] = ..., device_limit_bytes: _Optional[int] = ..., pairs: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Amended(_message.Message):
    __slots__ = ("epoch", "attempt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Mirrored(_message.Message):
    __slots__ = ("epoch", "attempt", "blocks_missing")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    blocks_missing: int
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., blocks_missing: _Optional[int] = ...) -> None: ...

class SavedFile(_message.Message):
    __slots__ = ("name", "bytes", "sha256", "base", "reused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    sha256: str
    base: bool
    reused: bool
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., base: _Optional[bool] = ..., reused: _Optional[bool] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("epoch", "version", "files", "error", "number", "write_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    files: _containers.RepeatedCompositeFieldContainer[SavedFile]
    error: str
    number: int
    write_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[SavedFile, _Mapping]]] = ..., error: _Optional[str] = ..., number: _Optional[int] = ..., write_seconds: _Optional[float] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("epoch", "version", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    number: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class EvaluationDone(_message.Message):
    __slots__ = ("epoch", "evaluation", "loss_sum", "loss_tokens", "right_tokens", "pairs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    LOSS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RIGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    evaluation: int
    loss_sum: float
    loss_tokens: int
    right_tokens: int
    pairs: Pairs
    def __init__(self, epoch: _Optional[int] = ..., evaluation: _Optional[int] = ..., loss_sum: _Optional[float] = ..., loss_tokens: _Optional[int] = ..., right_tokens: _Optional[int] = ..., pairs: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("error", "exit_code", "epoch", "attempt", "timed_out")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    error: str
    exit_code: int
    epoch: int
    attempt: int
    timed_out: bool
    def __init__(self, error: _Optional[str] = ..., exit_code: _Optional[int] = ..., epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., timed_out: _Optional[bool] = ...) -> None: ...

class CutOff(_message.Message):
    __slots__ = ("epoch", "loss")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    loss: str
    def __init__(self, epoch: _Optional[int] = ..., loss: _Optional[str] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("heartbeat", "refused", "fence", "drain", "restore", "begin", "run_attempt", "amend", "commit", "skip", "settle", "save", "evaluate", "shutdown", "missing")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    RUN_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AMEND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    refused: Refused
    fence: Fence
    drain: Drain
    restore: Restore
    begin: Begin
    run_attempt: RunAttempt
    amend: Amend
    commit: Commit
    skip: Skip
    settle: Settle
    save: Save
    evaluate: Evaluate
    shutdown: Shutdown
    missing: Missing
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., run_attempt: _Optional[_Union[RunAttempt, _Mapping]] = ..., amend: _Optional[_Union[Amend, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., skip: _Optional[_Union[Skip, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., shutdown: _Optional[_Union[Shutdown, _Mapping]] = ..., missing: _Optional[_Union[Missing, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("member", "pid", "cause")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    member: str
    pid: int
    cause: str
    def __init__(self, member: _Optional[str] = ..., pid: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("member",)
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    member: str
    def __init__(self, member: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("epoch", "saving", "cause")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    saving: int
    cause: str
    def __init__(self, epoch: _Optional[int] = ..., saving: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("epoch", "incarnation", "source", "version", "partner", "record", "generation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: int
    source: str
    version: int
    partner: str
    record: Record
    generation: int
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., source: _Optional[str] = ..., version: _Optional[int] = ..., partner: _Optional[str] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("version", "attempt", "decision", "coefficient", "inverse_loss_scale", "learning_rate", "bias_step", "incarnation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    COEFFICIENT_FIELD_NUMBER: _ClassVar[int]
    INVERSE_LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BIAS_STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    version: int
    attempt: int
    decision: int
    coefficient: float
    inverse_loss_scale: float
    learning_rate: float
    bias_step: int
    incarnation: int
    def __init__(self, version: _Optional[int] = ..., attempt: _Optional[int] = ..., decision: _Optional[int] = ..., coefficient: _Optional[float] = ..., inverse_loss_scale: _Optional[float] = ..., learning_rate: _Optional[float] = ..., bias_step: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("member", "address")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    member: str
    address: str
    def __init__(self, member: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("epoch", "record", "endpoints", "next_attempt", "next_evaluation", "plan_digest", "numerics_digest", "bereft", "strange")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVALUATION_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BEREFT_FIELD_NUMBER: _ClassVar[int]
    STRANGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    record: Record
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    next_attempt: int
    next_evaluation: int
    plan_digest: str
    numerics_digest: str
    bereft: _containers.RepeatedScalarFieldContainer[str]
    strange: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., next_attempt: _Optional[int] = ..., next_evaluation: _Optional[int] = ..., plan_digest: _Optional[str] = ..., numerics_digest: _Optional[str] = ..., bereft: _Optional[_Iterable[str]] = ..., strange: _Optional[_Iterable[str]] = ...) -> None: ...

class RunAttempt(_message.Message):
    __slots__ = ("epoch", "attempt", "base_version", "data_position", "loss_scale", "learning_rate", "hold")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    base_version: int
    data_position: int
    loss_scale: float
    learning_rate: float
    hold: bool
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., base_version: _Optional[int] = ..., data_position: _Optional[int] = ..., loss_scale: _Optional[float] = ..., learning_rate: _Optional[float] = ..., hold: _Optional[bool] = ...) -> None: ...

class Amend(_message.Message):
    __slots__ = ("epoch", "attempt", "record")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    record: Record
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "record", "peers_seconds", "optimizer_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PEERS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    record: Record
    peers_seconds: float
    optimizer_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., peers_seconds: _Optional[float] = ..., optimizer_seconds: _Optional[float] = ...) -> None: ...

class Skip(_message.Message):
    __slots__ = ("epoch", "attempt", "peers_seconds", "optimizer_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEERS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempt: int
    peers_seconds: float
    optimizer_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., attempt: _Optional[int] = ..., peers_seconds: _Optional[float] = ..., optimizer_seconds: _Optional[float] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("epoch", "version", "record")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    record: Record
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("epoch", "version", "directory", "weights_only", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    directory: str
    weights_only: bool
    number: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., directory: _Optional[str] = ..., weights_only: _Optional[bool] = ..., number: _Optional[int] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("epoch", "evaluation", "base_version", "set")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    evaluation: int
    base_version: int
    set: str
    def __init__(self, epoch: _Optional[int] = ..., evaluation: _Optional[int] = ..., base_version: _Optional[int] = ..., set: _Optional[str] = ...) -> None: ...

class Shutdown(_message.Message):
    __slots__ = ("keep_memory", "reason", "exit_code")
    KEEP_MEMORY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    keep_memory: bool
    reason: str
    exit_code: int
    def __init__(self, keep_memory: _Optional[bool] = ..., reason: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("within_seconds",)
    WITHIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    within_seconds: float
    def __init__(self, within_seconds: _Optional[float] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member", "state", "pid", "silent_seconds", "restarts", "doing", "report", "blocks_missing", "gone_seconds", "why", "next")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSING_FIELD_NUMBER: _ClassVar[int]
    GONE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    member: str
    state: str
    pid: int
    silent_seconds: float
    restarts: int
    doing: Heartbeat
    report: AttemptDone
    blocks_missing: int
    gone_seconds: float
    why: str
    next: str
    def __init__(self, member: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., restarts: _Optional[int] = ..., doing: _Optional[_Union[Heartbeat, _Mapping]] = ..., report: _Optional[_Union[AttemptDone, _Mapping]] = ..., blocks_missing: _Optional[int] = ..., gone_seconds: _Optional[float] = ..., why: _Optional[str] = ..., next: _Optional[str] = ...) -> None: ...

class Happening(_message.Message):
    __slots__ = ("number", "age_seconds", "kind", "step", "seconds", "text", "steps_lost", "cause")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STEPS_LOST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    number: int
    age_seconds: float
    kind: str
    step: int
    seconds: float
    text: str
    steps_lost: int
    cause: str
    def __init__(self, number: _Optional[int] = ..., age_seconds: _Optional[float] = ..., kind: _Optional[str] = ..., step: _Optional[int] = ..., seconds: _Optional[float] = ..., text: _Optional[str] = ..., steps_lost: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "run_name", "phase", "epoch", "version", "attempt", "steps", "last_metrics_json", "members", "message", "eta_seconds", "plan_scheme", "saved_version", "has_saved", "inputs", "happenings", "pausing", "phase_seconds", "saving_version", "data_epoch", "data_epochs")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ETA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAN_SCHEME_FIELD_NUMBER: _ClassVar[int]
    SAVED_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_SAVED_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    HAPPENINGS_FIELD_NUMBER: _ClassVar[int]
    PAUSING_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVING_VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_name: str
    phase: str
    epoch: int
    version: int
    attempt: int
    steps: int
    last_metrics_json: str
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    message: str
    eta_seconds: float
    plan_scheme: str
    saved_version: int
    has_saved: bool
    inputs: str
    happenings: _containers.RepeatedCompositeFieldContainer[Happening]
    pausing: bool
    phase_seconds: float
    saving_version: int
    data_epoch: float
    data_epochs: float
    def __init__(self, run_id: _Optional[str] = ..., run_name: _Optional[str] = ..., phase: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., attempt: _Optional[int] = ..., steps: _Optional[int] = ..., last_metrics_json: _Optional[str] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., message: _Optional[str] = ..., eta_seconds: _Optional[float] = ..., plan_scheme: _Optional[str] = ..., saved_version: _Optional[int] = ..., has_saved: _Optional[bool] = ..., inputs: _Optional[str] = ..., happenings: _Optional[_Iterable[_Union[Happening, _Mapping]]] = ..., pausing: _Optional[bool] = ..., phase_seconds: _Optional[float] = ..., saving_version: _Optional[int] = ..., data_epoch: _Optional[float] = ..., data_epochs: _Optional[float] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("directory", "version")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    directory: str
    version: int
    def __init__(self, directory: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class WeightsReply(_message.Message):
    __slots__ = ("version", "files")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    version: int
    files: _containers.RepeatedCompositeFieldContainer[SavedFile]
    def __init__(self, version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[SavedFile, _Mapping]]] = ...) -> None: ...
