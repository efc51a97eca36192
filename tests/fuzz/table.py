"""Every decoder of bytes from outside: what fuzzes it, or why nothing does."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.fuzz.target import Target
from tests.fuzz.targets.data_files import DATA_FILES
from tests.fuzz.targets.dcp import DCP
from tests.fuzz.targets.hub_files import HUB_FILES
from tests.fuzz.targets.keys import KEYS
from tests.fuzz.targets.messages import MESSAGES
from tests.fuzz.targets.pickles import PICKLES
from tests.fuzz.targets.plans import PLANS
from tests.fuzz.targets.run_files import RUN_FILES
from tests.fuzz.targets.saved import SAVED
from tests.fuzz.targets.trainer import TRAINER
from tests.fuzz.targets.wire import WIRE

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            *WIRE,
            *MESSAGES,
            *RUN_FILES,
            *HUB_FILES,
            *SAVED,
            *PICKLES,
            *PLANS,
            *KEYS,
            *DATA_FILES,
            *TRAINER,
            *DCP,
        )
    }
)

_OWN = "makes values of this process's own bytes: a digest, a buffer, a text it has just written"
_KERNEL = "reads what the kernel says, in a form that it promises"
_READ = "reads a file again that was read, and refused if it is damaged, just before"
_SEALED = "reads a file whose checksum was compared with inputs.json before"
_SCHEDULER = "shows what the scheduler says, which has proved to be the run's, and wrote it itself"
_MEMORY = "makes a view of memory at places that the layout says, whatever bytes are there"
_TOOL = "reads lines of a process that this one has started"
_PATTERN = "matches a whole name with a pattern, and any other name is none"
_NAMED_SO = "is only named like a decoder"

EXCUSED: Mapping[str, str] = MappingProxyType(
    {
        "shm.bases.parse_name": _PATTERN,
        "shm.bases.BaseMapping.__init__": _MEMORY,
        "daemons.memory.bases.sharing.verified": _MEMORY,
        "protocol.run.bases.base_identity.base_digest": _OWN,
        "client.cli.Command.parse_args": _NAMED_SO,
        "client.planning.tuning._searched": _OWN,
        "config.hub_names.HubName.parse": _PATTERN,
        "daemons.node.preparing.fitting.planned_run._frugal": _OWN,
        "daemons.node.preparing.fitting.reliefs._with_settings": _OWN,
        "daemons.node.preparing.hub.HubFiles._fetch": _TOOL,
        "models.hub.fetch._fields": "refuses damage; readers of its values have targets",
        "models.hub.fetch.main": _OWN,
        "models.inference.early._check_type": "damage is left to the preparation",
        "client.planning.data_rows.show_text": _TOOL,
        "client.planning.data_rows.read_rows": _TOOL,
        "client.planning.starting._summary": _TOOL,
        "client.planning.starting._measured": _TOOL,
        "client.exchange.imports._read": _TOOL,
        "models.apart.verdicts._fields": "reads a file of this user's cache; damage is a miss",
        "models.data.chat.forms.parsed_object": "any error of the text leaves it a text",
        "protocol.run.data_size.mixed_lengths": _SEALED,
        "models.data.chat.conversation.pair_of": "hands a record to readers, which have targets",
        "client.exchange.inspection.inspect": _TOOL,
        "models.adapters.modules.drawn": _OWN,
        "models.data.rows.packing._rows_of": _OWN,
        "client.planning.starting._model_settings": "reads a user's config.json, refuses damage",
        "client.planning.starting._put_template": "searches for words; preparation reads the file",
        "client.inference.tools._answer": _TOOL,
        "models.inference.evaluate._token_rows": _READ,
        "workers.first_pass.lines": _READ,
        "client.views.screen.following._Follower._fresh": _SCHEDULER,
        "client.views.trace.chrome_trace.chrome_trace": _NAMED_SO,
        "client.views.control.show_status": _SCHEDULER,
        "client.views.control.status_dict": _SCHEDULER,
        "daemons.node.preparing.places.move_tokens": _SEALED,
        "models.checkpoints.export.write_config": _OWN,
        "models.checkpoints.layout._file_order": _OWN,
        "models.checkpoints.layout._type_name": _OWN,
        "client.weights.folder.name_step": _TOOL,
        "models.data.sources._has_text": "asks json_objects and csv_rows for one record",
        "daemons.fetch.reads.Read._words": "hands bytes of one size to CopiedWords.unpack",
        "daemons.fetch.serving.address_of": _OWN,
        "chaos.checks._decisions": "reads the journal of a run that has just ended well",
        "daemons.memory.server.ServingMetrics.malformed": _NAMED_SO,
        "daemons.mirror.metrics.MirrorMetrics.malformed": _NAMED_SO,
        "daemons.preload.fork_request.ForkRequest.of": "reads an inherited descriptor of its node",
        "protocol.wire.states.StateReader.words": "hands 16 bytes to StateWords.unpack",
        "daemons.memory.metrics.MemoryMetrics.malformed": _NAMED_SO,
        "daemons.memory.segments._cut_short": "looks whether eight bytes are zero",
        "daemons.monitor.metrics.network._names_by_ipv4": _KERNEL,
        "daemons.monitor.metrics.network._names_by_ipv6": _KERNEL,
        "daemons.monitor.trackers.spans._Ids.generate_span_id": _OWN,
        "daemons.monitor.trackers.spans._Ids.generate_trace_id": _OWN,
        "daemons.optimizer.ceiling.measure_ceiling": _OWN,
        "daemons.optimizer.kernels.RemoteGradients.__init__": _OWN,
        "daemons.scheduler.journal.Journal.follow": _OWN,
        "daemons.scheduler.machine.machine.SchedulerMachine._cut_short": _NAMED_SO,
        "daemons.scheduler.main.read_rules": "asks RunDirectory, whose files have targets",
        "daemons.scheduler.metrics.SchedulerMetrics.line": _OWN,
        "models.binding.unpack": _NAMED_SO,
        "models.checkpoints.carried.read_carried": "copies files as they are",
        "models.checkpoints.carried._templates": "takes texts of a tokenizer that was opened",
        "models.checkpoints.checkpoint.Checkpoint.read_as_is": _READ,
        "models.checkpoints.constants.read_constants": _SEALED,
        "models.checkpoints.conversion.Weights.read_constant": _READ,
        "client.export.export": _TOOL,
        "models.checkpoints.exports.whole._write_file": _READ,
        "models.checkpoints.initial._drawn": _OWN,
        "models.data.chat.places.Widths.places": _OWN,
        "models.data.chat.places._settings": "reads settings that the library tokenizers wrote",
        "models.data.chunks._mapped": _MEMORY,
        "models.data.objectives.Masked._mask": _OWN,
        "models.data.pieces.locality.Locality.count": _OWN,
        "models.data.pieces.locality._state": "reads what the library says of its own object",
        "daemons.node.preparing.prepare._knows_its_weights": _READ,
        "daemons.node.preparing.prepare._lacks_references": _READ,
        "models.data.rows.references.read_references": "compares all bytes with their checksums",
        "models.inference.references.write_references": _READ,
        "models.inference.references._Partial.read": _OWN,
        "models.checkpoints.files.write_record": _READ,
        "models.prepare._keep_tokens": _READ,
        "protocol.security.token._sockets_at": _KERNEL,
        "models.data.rows.samples.SampleStream._drafts": _OWN,
        "models.data.rows.origins.Origin.times": _OWN,
        "models.data.rows.samples.Tally.duplicates": _OWN,
        "models.data.rows.samples.Tally.to_json": _OWN,
        "models.data.rows.sources._drawn": _OWN,
        "models.data.rows.sources._prepared_rows": "takes the guards of models.prepare._has",
        "models.data.token_file.TokenFile._fits": _MEMORY,
        "models.data.token_file._is_safetensors": _NAMED_SO,
        "models.data.token_sources.TokenSources.__init__": _OWN,
        "models.prepare._prepare_data": _OWN,
        "models.prepare._prepare_sets": _READ,
        "models.data.tokenizer.ByteTokenizer.encode_documents": "takes any bytes, one token each",
        "protocol.run.hardware.sweep_rates._shared": _OWN,
        "models.runtime.ModelRuntime._reseed": _OWN,
        "models.surgery.hf._read_by_type": _NAMED_SO,
        "planner.simulate.weights._read_from_owners": _NAMED_SO,
        "planner.traces.fitted.Fit._read_bandwidth": _NAMED_SO,
        "planner.planning.auto.TunedConfig.with_schedule": _OWN,
        "protocol.run.data_size.TrainingData.of": _SEALED,
        "protocol.security.token.peer_process": _KERNEL,
        "protocol.wire.connection_limiter.ConnectionLimiter._count": _KERNEL,
        "protocol.wire.connection_limiter._unread_bytes": _KERNEL,
        "shm.memory.NodeMemory._view": _MEMORY,
        "shm.memory.NodeMemory.halves": _MEMORY,
        "shm.segment._populate": _MEMORY,
        "workers.channels.group.GroupChannel.take": "takes bytes of a size that Packing checked",
        "workers.data._feistel": _OWN,
        "workers.platforms.cuda.pinned.StagingPool.take": _OWN,
        "workers.platforms.emulated.runtime._hash": _OWN,
        "workers.platforms.emulated.runtime._tensors": _OWN,
        "workers.state.updates._mapped": _OWN,
    }
)
"""Functions that the census finds and no target covers, and why that is right."""
