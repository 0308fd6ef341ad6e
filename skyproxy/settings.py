"""Every limit, interval and size in one place, with its unit in its name.

Each field can be set by an environment variable: `SKYPROXY_` and the field's name in capitals. Sizes are in bytes,
intervals in seconds. Neither a secret nor a URL belongs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyproxy.units import settings_from


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force in this process; `load()` reads the environment once."""

    insecure: bool = False
    """True if the token may travel to other machines without encryption, by "ws://"."""
    trust_worker: bool = False
    """True if workers that others started may send any object as a function's result: pickles, which run code here."""
    max_batch_commands: int = 64
    """Commands recorded before a batch is sent without being asked for, the first time after a wait."""
    max_loop_batch_commands: int = 512
    """The same for a program that runs without waiting for values: larger batches, which repeat in a loop."""
    max_inline_bytes: int = 64 << 10
    """Uploads and downloads up to this size travel with the operations, larger ones on the bulk connection."""
    max_in_flight_bytes: int = 64 << 20
    """Bytes of batches that may wait for their ack before the recorder waits too."""
    max_in_flight_batches: int = 256
    """Batches that may wait for their ack, so that the program does not run far ahead of the worker; enough to keep a
    worker busy over a link of 80 ms."""
    max_frame_bytes: int = 64 << 20
    """The largest frame either side accepts."""
    chunk_bytes: int = 1 << 20
    """The size of a piece of a bulk transfer."""
    remember_uploads: bool = True
    """True if workers may keep what this client uploads, so that the same content need not travel again."""
    min_blob_bytes: int = 1 << 20
    """Uploads from this size on are kept by workers, under the hash of their content."""
    max_blob_bytes: int = 4 << 30
    """The bytes of uploads that a worker keeps; in memory, at most a quarter of what it may use. 0: nothing."""
    prompt_release_bytes: int = 256 << 10
    """Tensors from this size on are released in the very place where they die, smaller ones with the next batch."""
    sync_project: bool = True
    """True if workers import the user's own modules from the program's folders, or from copies of their files."""
    max_project_files: int = 5_000
    """Files of one folder that are copied to a worker; of a larger one, only what the program itself has loaded."""
    max_project_bytes: int = 32 << 20
    """The same for their size."""
    max_queued_calls: int = 100_000
    """Calls that may wait in one pool for a free process."""
    max_handles: int = 4_000_000
    """Values that one session may hold on a worker."""
    max_sessions: int = 64
    """Sessions that one worker accepts."""
    max_connections: int = 256
    """Connections that one worker accepts, those still in their handshake included."""
    max_pending_connections: int = 64
    """Connections that did not show the token yet; when one more comes, the oldest of them ends."""
    max_pending_connections_per_address: int = 32
    """The same for those that come from one address."""
    token_timeout_seconds: float = 5.0
    """The time that a fresh connection to a worker may take to show its token, encryption included."""
    max_sessions_per_client: int = 48
    """The same for those that have one token and come from one address."""
    max_connections_per_client: int = 192
    """The same for connections."""
    token_poll_seconds: float = 2.0
    """The interval at which a worker looks whether its tokens have changed."""
    token_overlap_seconds: float = 600.0
    """The time for which a token that was replaced is accepted beside its successor."""
    max_signatures: int = 65_536
    """Op signatures that one session may define."""
    max_cached_shapes: int = 65_536
    """Entries in the client's cache of inferred metadata, a device; the oldest quarter goes when it is full."""
    max_calls: int = 1024
    """Functions that one worker runs at a time."""
    max_isolated_calls: int = 64
    """Functions that one worker runs in processes of their own at a time."""
    isolate: bool = False
    """True if functions that a program runs on a node get a process of their own there, where the worker can do that;
    `skyproxy run` sets it for its script."""
    debug: bool = False
    """True if breakpoints and exceptions in functions and scripts that a program runs wait for `skyproxy debug`."""
    breakpoint_seconds: float = 600.0
    """The time for which a function waits there for somebody; then it ends."""
    max_kept_calls: int = 1024
    """Calls that have ended and that a worker keeps until their caller has taken the result; the oldest go first."""
    max_kept_result_bytes: int = 1 << 30
    """The bytes that the results of those calls may hold in the worker's memory, tensors not counted."""
    max_kept_function_bytes: int = 64 << 20
    """The bytes of functions that a worker keeps to be called again by their digest; the oldest go first."""
    max_payload_bytes: int = 64 << 30
    """The bytes that one call may send: function and arguments in one direction, the result in the other."""
    pass_broadcasts: bool = True
    """True if processes of a pool on other machines pass large broadcasts on to one another; else the client sends them
    to each."""
    max_waiting_output_bytes: int = 1 << 20
    """The bytes of output that may be ahead of a function's caller; without one, the oldest text is dropped."""
    max_waiting_items: int = 64
    """Items that a generator function may yield ahead of its caller before it waits."""
    call_grace_seconds: float = 300.0
    """The time for which a worker keeps the calls of a client that is gone, running or ended."""
    max_jobs: int = 100
    """Jobs of one token that a worker keeps, those that have ended included; the oldest ended ones go first."""
    max_running_jobs: int = 16
    """Jobs of one token that run at a time on one worker."""
    max_job_bytes: int = 1 << 30
    """The bytes that one job may send: its files, or its function and arguments."""
    max_job_log_bytes: int = 16 << 20
    """The bytes that a worker keeps of what a job prints, the newest."""
    max_kept_job_bytes: int = 8 << 30
    """The bytes that the ended jobs of one token may take on a worker's disk, checkpoints included; the oldest go
    first."""
    kept_job_seconds: float = 2_592_000.0
    """The time for which a worker keeps a job that has ended: its status, log, result and checkpoints."""
    job_grace_seconds: float = 5.0
    """The time that a job has after SIGTERM, for example to write a checkpoint, before it is killed."""
    job_restart_seconds: float = 1.0
    """The pause before a job that died is started again; twice as long each further time, up to a minute."""
    connect_timeout_seconds: float = 10.0
    handshake_timeout_seconds: float = 10.0
    worker_start_timeout_seconds: float = 60.0
    cluster_timeout_seconds: float = 30.0
    """The time that one request to a Kubernetes API server may take."""
    ping_interval_seconds: float = 5.0
    """The interval at which a silent bulk connection is asked whether the worker still lives."""
    liveness_timeout_seconds: float = 30.0
    """A worker that answered nothing for this long is lost."""
    reconnect: bool = True
    """True if a session with a worker elsewhere outlives its connections: they are made anew when they break."""
    reconnect_seconds: float = 600.0
    """The time for which a client tries to get a broken connection back."""
    takeover_seconds: float = 30.0
    """The time for which a protected session with `new_worker=` tries to reach its worker, before another one."""
    max_log_bytes: int = 256 << 20
    """Bytes of batches and uploads that a protected session keeps, to have another worker do them again; at three
    quarters, a snapshot is taken."""
    silence_seconds: float = 10.0
    """A connection that answered nothing for this long is taken for broken, where it can be made anew."""
    client_silence_seconds: float = 15.0
    """A worker cuts the connections of a client that has said nothing for this long, though it was asked, and may come
    back to its session. 0: the system tells, after some minutes."""
    session_grace_seconds: float = 600.0
    """The time for which a worker keeps a session without a connection, if its client asks for it. 0: not at all."""
    max_detached_sessions: int = 16
    """Sessions without a connection that one worker keeps; when one more breaks, the oldest of them ends."""
    named_session_seconds: float = 86400.0
    """The time for which a worker keeps a named session that nobody uses."""
    saved_session_days: float = 30.0
    """The days for which a worker's volume keeps a named session that was saved and that nobody has come back to."""
    named_return_seconds: float = 5.0
    """The time that a client whose connection broke has to come back before others may have its named session."""
    name_lease_seconds: float = 15.0
    """The time without a sign of life after which a worker of the same volume has no named sessions any more."""
    max_named_sessions: int = 64
    """Named sessions of one token that one worker keeps."""
    max_names: int = 1024
    """Values that one named session may have."""
    max_named_bytes: int = 16 << 20
    """The bytes that the structures of a named session's values may take; tensors on the worker count nothing."""
    max_kept_answer_bytes: int = 64 << 20
    """The bytes that a worker keeps of answers whose arrival the client has not confirmed."""
    max_snapshot_copy_bytes: int = 1 << 30
    """The bytes of a session that a worker copies ahead of the disk when it writes a snapshot; beyond, it waits."""
    max_brought_snapshot_bytes: int = 1 << 40
    """The bytes that the snapshots of one token may have on a worker's volume for clients to bring another one."""
    snapshot_stall_seconds: float = 120.0
    """The time for which a worker's volume may take nothing of a snapshot before that is given up."""
    leave_seconds: float = 20.0
    """The time that a worker with a place for snapshots, told to end by SIGTERM, gives its clients for the last one."""
    close_timeout_seconds: float = 1.0
    rank_start_timeout_seconds: float = 600.0
    """The time that the ranks of a pool may take to set up their plugins, before those that are missing are named."""
    rank_stop_timeout_seconds: float = 2.0
    """The time for which a rank may go on after another one failed, before its process is given up."""
    rank_close_timeout_seconds: float = 10.0
    """The time that the ranks of a pool may take to leave their plugins' hooks when it ends."""
    show_progress: bool = True
    """True if transfers that take longer than a second show a progress bar, and other waits of more than two seconds
    what they wait for, on a terminal or in a notebook."""
    announce_worker: bool = True
    """True if the first use of `sky:0` says in a line on standard error which worker it is, where the program did not
    choose one itself."""
    cancel_on_stop: bool = True
    """True if Stop in a notebook also drops the operations that the worker has not begun; without it, they run, and the
    next cell waits for them."""
    cancel_on_interrupt: bool = False
    """True if Ctrl-C that ends a wait does so in any other program. A program that saves what it has when it is
    interrupted counts on all that it has recorded."""
    record_lines: bool = True
    """True if errors name the user's line that recorded an op; without it, PyTorch's own line that called us."""
    launch_blocking: bool = False
    """True if each operation waits for its outcome, so that its error is raised at its statement."""


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that the environment asks for.

    Raises:
        ConfigurationError: a variable's text is not a number (or a truth value) of its field's kind, or is negative.
    """
    return settings_from(environ, "SKYPROXY_", Settings)


SETTINGS = load()
