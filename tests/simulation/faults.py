"""What goes wrong in a seed: a plan that the seed alone decides, carried out under virtual time.

A fault counts as effective when a process died of it, an epoch broke, or storage refused; delays
and reorderings are counted apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from penstock.protocol.run.names import SCHEDULERD
from tests.simulation.cluster import Cluster
from tests.simulation.endings import ENDINGS, Endings
from tests.simulation.kernel import Process
from tests.simulation.mistakes import MISTAKES, Mistakes
from tests.simulation.pairs import PAIRS, Pairs
from tests.simulation.plans import DEATHS, Fault
from tests.simulation.rare import HUNG_EARLY
from tests.simulation.rows import INTRUDER
from tests.simulation.strangers import pose_as
from tests.simulation.wires import WIRES, Wires

SWEEPERS = ("optimizerd", "mirrord")
VICTIMS = {"worker": 5, "optimizerd": 6, "memoryd": 4, "schedulerd": 5, "mirrord": 6}
FOLLOWERS = ("optimizerd", "optimizerd", "memoryd", "mirrord", "worker")
SPEAKERS = ("grpc-writer", "member-heartbeat")
"""Threads without which a process is silent."""
POWER_CUTS = ("switch off", "switch off in a save")
MOST_HUNG = 2
"""Processes that hang at a time: each may take as long as an epoch's beginning may."""
PATIENCE_S = 60.0
"""Virtual seconds in which a run must end, or decide an attempt, when nothing goes wrong any more:
a process that hangs is given the attempt's timeout, a node that dies young its longest delay,
members that missed the end a node's ``told_grace_s``, and a save may take long before.
"""
HUNG_PATIENCE_S = 760.0
"""The same while a process lives that hangs: the beginning of an epoch has 600 s, and so has who
has not joined, and a minute more until its node hears of that.
"""


class Injector:
    """Carries out a plan, fault after fault."""

    def __init__(self, cluster: Cluster, plan: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel
        self.plan = plan
        self._plan = list(plan)
        self.left = len(plan)
        self.under_way = 0
        self.last_s = cluster.kernel.now
        self._watched: list[tuple[str, int]] = []
        self._awaited: tuple[Fault, int] | None = None
        self._struck: set[Fault] = set()
        self._striking = False
        self._endings = Endings(cluster, self._effective, self._for_a_while)
        self._wires = Wires(cluster, self._watch, self._for_a_while)
        self._mistakes = Mistakes(cluster, self._effective, self._after_decisions)
        self._pairs = Pairs(
            cluster,
            self._struck_by,
            self._after_decisions,
            self._for_a_while,
            self._goes_down,
        )
        self._due: list[tuple[int, Callable[[], None]]] = []
        """What happens as soon as so many attempts are decided."""
        cluster.history.on_decision = self.decided
        cluster.history.deaths_alone = all(fault.kind in DEATHS for fault in plan)

    @property
    def done(self) -> bool:
        """Whether nothing goes wrong any more."""
        return not self.left and not self.under_way

    def start(self) -> None:
        """Wait for the first fault."""
        self._next()

    def settle(self) -> None:
        """Count the faults that broke an epoch since they began."""
        epoch = self._cluster.history.epoch
        for kind, since in self._watched:
            if epoch > since:
                self._cluster.history.effective[kind] += 1
            else:
                self._cluster.history.delays += 1
        self._watched.clear()

    def _next(self) -> None:
        if not self._plan:
            return
        fault, self._awaited = self._plan.pop(0), None
        if fault.decisions:
            decided = self._cluster.history.num_decided
            self._awaited = (fault, decided + fault.decisions)
            # Where nothing is decided any more it strikes all the same.
            self._kernel.after(1.0 + fault.after_s, lambda: self._strike_late(fault, decided))
        else:
            self._kernel.after(fault.after_s, lambda: self._strike(fault))

    def decided(self) -> None:
        """An attempt was decided."""
        due = [entry for entry in self._due if self._cluster.history.num_decided >= entry[0]]
        for entry in due:
            self._due.remove(entry)
            entry[1]()
        if self._awaited is not None and self._cluster.history.num_decided >= self._awaited[1]:
            fault, self._awaited = self._awaited[0], None
            self._kernel.after(fault.after_s, lambda: self._strike(fault))

    def _after_decisions(self, count: int, action: Callable[[], None]) -> None:
        self._due.append((self._cluster.history.num_decided + count, action))

    def _strike_late(self, fault: Fault, decided: int) -> None:
        """The attempts that a fault waits for have not been decided: somebody must have been in the
        way, lately.
        """
        cluster, now_s = self._cluster, self._kernel.now
        if fault not in self._struck and not cluster.ended and fault.patient:
            hung = any(process.hung for process in cluster.living)
            until_s = max(self.last_s, cluster.changed_s) + (
                HUNG_PATIENCE_S if hung else PATIENCE_S
            )
            if self.under_way or now_s <= until_s:
                later_s = max(until_s - now_s, 0.0) + 1.0
                self._kernel.after(later_s, lambda: self._strike_late(fault, decided))
                return
            if cluster.history.num_decided == decided:
                cluster.history.violation(f"nothing is decided any more: {cluster.state()}")
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault in self._struck:
            return
        self._struck.add(fault)
        self._awaited = None
        self.left -= 1
        if self._cluster.ended:
            return
        self.settle()
        self.last_s = self._kernel.now
        self._kernel.note("fault", fault.kind)
        self._striking = True
        dice = random.Random(fault.number)
        if fault.kind in ENDINGS:
            ENDINGS[fault.kind](self._endings, dice)
        elif fault.kind in WIRES:
            WIRES[fault.kind](self._wires, dice)
        elif fault.kind in PAIRS:
            PAIRS[fault.kind](self._pairs, dice)
        elif fault.kind in MISTAKES:
            MISTAKES[fault.kind](self._mistakes, dice)
        else:
            _STRIKES[fault.kind](self, dice)
        self._striking = False
        self._next()

    # ---- kinds ----

    def _effective(self, kind: str) -> None:
        self._cluster.history.effective[kind] += 1

    def _struck_by(self, kind: str) -> None:
        """A fault that was laid before strikes now."""
        self._effective(kind)
        self.last_s = self._kernel.now

    def _watch(self, kind: str) -> None:
        self._watched.append((kind, self._cluster.history.epoch))

    def _victim(self, dice: random.Random) -> Process | None:
        living = [p for p in self._cluster.living if p.kind in VICTIMS]
        if not living:
            return None
        return dice.choices(living, [VICTIMS[p.kind] for p in living])[0]

    def _kill(self, dice: random.Random) -> None:
        victim = self._victim(dice)
        if victim is not None:
            self._effective("kill")
            victim.kill()

    def _kill_at_a_step(self, dice: random.Random) -> None:
        victim = self._victim(dice)
        if victim is not None and victim.steps_left is None:
            steps = 1 + int(dice.expovariate(1.0) * dice.choice((2, 8, 30)))
            victim.doom(steps, lambda: self._effective("kill at a step"))

    def _kill_at_a_commit(self, dice: random.Random) -> None:
        """A few points after the next decision is journaled: who has to follow it."""
        kind = dice.choice(FOLLOWERS)
        steps = 1 + int(dice.expovariate(1.0) * dice.choice((2, 8)))
        fallen = partial(self._effective, "kill at a commit")

        def strike() -> None:
            victims = [p for p in self._cluster.living if p.kind == kind and p.steps_left is None]
            if victims:
                dice.choice(victims).doom(steps, fallen)

        self._after_decisions(1, strike)

    def _cut_a_sweep(self, dice: random.Random) -> None:
        victims = [p for p in self._cluster.living if p.kind in SWEEPERS]
        if victims:
            self._cluster.cuts[dice.choice(victims).name] = dice.random()

    def _kill_several(self, dice: random.Random) -> None:
        living = [p for p in self._cluster.living if p.kind in VICTIMS]
        for victim in dice.sample(living, min(len(living), dice.randint(2, 4))):
            self._effective("kill several")
            victim.kill()

    def _kill_a_node(self, dice: random.Random) -> None:
        nodes = [p for p in self._cluster.living if p.kind == "node"]
        if nodes:
            self._effective("kill a node")
            dice.choice(nodes).kill()

    def _kill_in_a_restore(self, dice: random.Random) -> None:
        """A moment after memory begins to be filled the next time."""

        def strike() -> None:
            victim = self._victim(dice)
            if victim is not None:
                self._effective("kill in a restore")
                victim.kill()

        longest_s = dice.choice((8e-3, 8e-3, 0.1))
        self._cluster.history.at_restore.append(
            lambda: self._kernel.after(dice.random() * longest_s, strike)
        )

    def _lose_a_machine(self, dice: random.Random) -> None:
        self._machine_down(dice, "lose a machine")

    def _switch_off(self, dice: random.Random) -> None:
        self._machine_down(dice, "switch off")

    def _machine_down(self, dice: random.Random, kind: str) -> None:
        cluster = self._cluster
        self._goes_down(dice.randrange(len(cluster.machines)), dice, kind)

    def _switch_off_in_a_save(self, dice: random.Random) -> None:
        """A moment after a save begins the next time."""
        index = dice.choice((0, dice.randrange(len(self._cluster.machines))))

        def strike() -> None:
            self._goes_down(index, dice, "switch off in a save")

        longest_s = dice.choice((4e-3, 15e-3, 0.1))
        self._cluster.history.at_save.append(
            lambda: self._kernel.after(dice.random() * longest_s, strike)
        )

    def _lose_two_machines(self, dice: random.Random) -> None:
        """A node's partner goes while the node's loss is still being mended, or both at once."""
        cluster = self._cluster
        index = dice.randrange(len(cluster.machines))
        partner = (index + 1) % len(cluster.machines)
        self._goes_down(index, dice, "lose two machines")
        self._for_a_while(
            dice,
            dice.choice((1e-3, 0.1, 2.0, 6.0)),
            lambda: self._goes_down(partner, dice, "lose two machines"),
            stalls=False,
        )

    def _lose_at_a_cut(self, dice: random.Random) -> None:
        """A moment after a sweep was cut short on another one: what it left is in memory when all
        memory is filled anew.
        """
        cluster = self._cluster
        victims = [p for p in cluster.living if p.kind in SWEEPERS]
        if not victims:
            return
        victim = dice.choice(victims)
        others = [i for i, m in enumerate(cluster.machines) if m is not victim.machine]
        index = dice.choice(others)

        def strike() -> None:
            self._goes_down(index, dice, "lose a machine at a cut")

        cluster.cuts[victim.name] = dice.random()
        cluster.history.at_cut.append(lambda: self._kernel.after(dice.random() * 5e-3, strike))

    def _lose_at_a_commit(self, dice: random.Random) -> None:
        """The scheduler dies as it announces the next decision, and a machine is lost: others may
        not have heard of the step that its memory had.
        """
        cluster, kind = self._cluster, "lose a machine at a commit"
        index = dice.randrange(len(cluster.machines))
        steps, delay_s = dice.randint(1, 5), dice.choice((0.0, 1e-3, 20e-3))

        def strike() -> None:
            scheduler = cluster.scheduler_process
            if scheduler is not None and scheduler.alive and scheduler.steps_left is None:
                scheduler.doom(steps, partial(self._effective, kind))
            lose = partial(self._goes_down, index, dice, kind)
            self._kernel.after(1e-4 + dice.random() * delay_s, lose)

        cluster.history.at_decision.append(strike)

    def _spare(self, dice: random.Random) -> None:
        """Nobody reaches a machine any more, and another one takes its node's place. A step or two
        after that was filled it goes, and the first one comes back with what it had.
        """
        cluster = self._cluster
        index = dice.randrange(len(cluster.machines))
        machine = cluster.machines[index]
        segments, boot = cluster.copy_of_memory(index), machine.boot
        if not self._goes_down(index, dice, "spare"):
            return

        def comes_back() -> None:
            if self._goes_down(index, dice, "spare"):
                cluster.bring_back(segments)
                machine.boot = boot

        def wait() -> None:
            soon = partial(self._kernel.after, dice.random() * 5e-3, comes_back)
            self._after_decisions(dice.choice((0, 1, 1, 1, 2)), soon)

        cluster.history.at_refill.append(wait)

    def _strike_in_a_reseed(self, dice: random.Random) -> None:
        """A moment after a replica begins anew the next time."""

        def strike() -> None:
            kind = dice.choice(("schedulerd", "mirrord", "mirrord", "machine"))
            if kind == "machine":
                index = dice.randrange(len(self._cluster.machines))
                self._goes_down(index, dice, "strike in a re-seed")
                return
            victims = [p for p in self._cluster.living if p.kind == kind and p.steps_left is None]
            if victims:
                steps = 1 + int(dice.expovariate(1.0) * dice.choice((2, 8)))
                fallen = partial(self._effective, "strike in a re-seed")
                dice.choice(victims).doom(steps, fallen)

        self._cluster.history.at_reseed.append(
            lambda: self._kernel.after(dice.random() * 12e-3, strike)
        )

    def _goes_down(self, index: int, dice: random.Random, kind: str) -> bool:
        """A machine goes with its memory, for a while; returns whether it was up."""
        cluster = self._cluster
        machine = cluster.machines[index]
        if not machine.up or index in cluster.codes:
            return False
        self._effective(kind)
        machine.up = False
        for process in [p for p in cluster.living if p.machine is machine]:
            if process.kind == "node":
                process.kill()
        for process in [p for p in cluster.living if p.machine is machine]:
            process.kill()
        cluster.history.machine_lost(index)
        cluster.lose_memory(index)
        machine.boot += "'"
        if dice.random() < 0.5:  # while its memory is filled anew
            cluster.doomed[f"memoryd.{machine.name}"] = dice.randint(1, 240)
        if cluster.kept and dice.random() < 0.5:  # while partners help, or are helped
            victim = dice.choice(cluster.machines)
            cluster.doomed[f"mirrord.{victim.name}"] = dice.randint(1, 120)
        if kind in POWER_CUTS:
            cluster.files.power_cut(machine, dice, hosts=index == 0)
            if index == 0:
                cluster.disk.power_cut(dice)
        self._for_a_while(dice, 2.0, lambda: setattr(machine, "up", True), stalls=False)
        return True

    def _for_a_while(
        self,
        dice: random.Random,
        longest_s: float,
        end: Callable[[], None],
        *,
        stalls: bool = True,
    ) -> None:
        """``stalls``: who is there may stand still meanwhile."""
        history = self._cluster.history
        self.under_way += 1
        history.stalls += stalls

        def over() -> None:
            self.under_way -= 1
            self.last_s = self._kernel.now
            if stalls:
                history.stalls -= 1
                history.stalled_s = self._kernel.now
            end()

        self._kernel.after(dice.random() * longest_s, over)

    def _stop(self, dice: random.Random) -> None:
        self._stopped(dice, 0.5)

    def _stop_for_long(self, dice: random.Random) -> None:
        self._stopped(dice, 15.0)

    def _stop_for_ever(self, dice: random.Random) -> None:
        victim = self._victim(dice)
        if victim is not None and not victim.stopped:
            victim.stop()
            self._watch("stop for ever")

    def _stop_a_newborn(self, dice: random.Random) -> None:
        """A process dies, and the one that its node starts in its place is stopped for ever before
        its program has begun, or soon after.
        """
        victim = self._victim(dice)
        if victim is not None:
            self._effective("stop a newborn")
            self._cluster.newborns[victim.name] = dice.random() * dice.choice((0.0, 0.025, 0.1))
            victim.kill()

    def _hang(self, dice: random.Random) -> None:
        """One thread of a process stands still for ever; the others go on, heartbeats among them,
        unless it was theirs.
        """
        self._hang_one(self._victim(dice), dice)

    def _hang_in_a_restore(self, dice: random.Random) -> None:
        """A moment after memory begins to be filled the next time: who fills it."""
        self._hang_at(self._cluster.history.at_restore, ("memoryd",), dice)

    def _hang_in_a_save(self, dice: random.Random) -> None:
        """A moment after a save begins the next time: who settles, or writes. Or an optimizerd just
        as it is asked to settle.
        """
        if dice.random() < 0.5:
            settles = self._cluster.history.at_settle
            settles.append(lambda: self._hang_one_of(("optimizerd",), dice, aim="main"))
            return
        self._hang_at(self._cluster.history.at_save, ("memoryd", "optimizerd"), dice)

    def _hang_at(
        self, moment: list[Callable[[], None]], kinds: tuple[str, ...], dice: random.Random
    ) -> None:
        def strike() -> None:
            self._hang_one_of(kinds, dice, aim="at work")

        moment.append(
            lambda: self._kernel.after(dice.random() * dice.choice((0.5e-3, 4e-3)), strike)
        )

    def _hang_one_of(self, kinds: tuple[str, ...], dice: random.Random, aim: str) -> None:
        victims = [p for p in self._cluster.living if p.kind in kinds]
        self._hang_one(dice.choice(victims) if victims else None, dice, aim)

    def _hang_one(self, victim: Process | None, dice: random.Random, aim: str = "") -> None:
        """A directory of saved states that hangs is for people to mend."""
        cluster = self._cluster
        if victim is None or sum(process.hung for process in cluster.living) >= MOST_HUNG:
            return
        threads = [t for t in victim.tasks if not t.done and t.name != "saved-states-0"]
        if aim == "at work":  # the newest does what has just begun; heartbeats go on
            threads = [task for task in threads if task.name not in SPEAKERS][-dice.randint(1, 3) :]
        first = bool(aim) or dice.random() < 0.3
        task = threads[0] if first else dice.choice(threads)
        task.hung = True
        self._kernel.note("hangs", victim.name, task.name)
        early = victim.kind != "schedulerd" and not cluster.knows(victim)
        victim.at_death.append(lambda: self._hung_is_dead(victim, early))

    def _hung_is_dead(self, victim: Process, early: bool) -> None:
        self.last_s = self._kernel.now
        if not self._striking and not victim.fell and not self._cluster.ended:
            self._effective("hang")  # it was noticed
            self._cluster.history.rare[HUNG_EARLY] += early and not self._cluster.knows(victim)

    def _stopped(self, dice: random.Random, longest_s: float) -> None:
        # A stranger's schedulerd that stands still with the journal open keeps the run's own out,
        # which ends for it, as it should, while other nodes wait for whoever mends that.
        living = [p for p in self._cluster.living if not p.stopped and p.kind != INTRUDER]
        if living:
            victim = dice.choice(living)
            victim.stop()
            self._watch("stop")
            self._for_a_while(dice, longest_s, victim.go_on)

    def _stranger(self, dice: random.Random) -> None:
        """Somebody says for a while to be a member, as a process does that was started twice."""
        victim = self._victim(dice)
        if victim is None:
            return
        cluster = self._cluster
        index, stays_s = cluster.machines.index(victim.machine), dice.choice((0.01, 0.5, 3.0))
        cluster.spawn(index, "stranger", partial(pose_as, victim.name, stays_s), delay_s=1e-3)
        self._for_a_while(dice, stays_s, lambda: None)
        self._watch("stranger")

    def _slow_machine(self, dice: random.Random) -> None:
        machine = dice.choice(self._cluster.machines)
        machine.slow = dice.choice((5.0, 50.0))
        self._cluster.history.delays += 1
        self._for_a_while(dice, 0.5, lambda: setattr(machine, "slow", 1.0))

    def _slow_network(self, dice: random.Random) -> None:
        network = self._cluster.network
        network.slow = dice.choice((5.0, 50.0))
        self._cluster.history.delays += 1
        self._for_a_while(dice, 0.5, lambda: setattr(network, "slow", 1.0))

    def _full_disk(self, dice: random.Random) -> None:
        cluster, disk = self._cluster, self._cluster.disk
        disk.full, disk.full_beside = dice.random() < 0.6, True
        cluster.excused.add(3)
        scheduler = cluster.process(SCHEDULERD)
        if scheduler is not None and dice.random() < 0.3:  # another one opens its journal there
            self._kernel.after(dice.random() * 0.1, scheduler.kill)

        def over() -> None:
            disk.full = disk.full_beside = False

        self._for_a_while(dice, 0.5, over)

    def _stop_and_kill(self, dice: random.Random) -> None:
        """A process stands still and dies of it: what came for it meanwhile it has not read."""
        kind = dice.choice((*FOLLOWERS, "schedulerd"))
        victims = [p for p in self._cluster.living if p.kind == kind and not p.stopped]
        if not victims:
            return
        victim = dice.choice(victims)
        victim.stop()

        def strike() -> None:
            if victim.alive:
                self._effective("stop and kill")
                victim.kill()

        self._for_a_while(dice, dice.choice((0.05, 0.3, 1.5)), strike)

    def _late_hello(self, dice: random.Random) -> None:
        """The next process that is ordered dead has connected before: its Hello comes later."""
        delay_s = dice.random() * dice.choice((2e-3, 10e-3, 0.1))

        def condemned(member: str, pid: int) -> None:
            server, scheduler = self._cluster.server, self._cluster.scheduler
            hello = scheduler.members.members[member].hello
            if hello is not None and hello.pid == pid:
                self._watch("late Hello")
                server.late(hello, delay_s)

        self._cluster.history.at_fence.append(condemned)

    def _jump_of_the_clock(self, dice: random.Random) -> None:
        skew_s = dice.uniform(-5000.0, 5000.0)
        self._cluster.history.delays += 1
        for process in self._cluster.living:
            process.world.skew_s += skew_s

    def _save(self, dice: random.Random) -> None:
        self._cluster.ask("snapshot")


_STRIKES: dict[str, Callable[[Injector, random.Random], None]] = {
    "kill": Injector._kill,
    "kill at a step": Injector._kill_at_a_step,
    "kill at a commit": Injector._kill_at_a_commit,
    "cut a sweep": Injector._cut_a_sweep,
    "kill several": Injector._kill_several,
    "kill a node": Injector._kill_a_node,
    "kill in a restore": Injector._kill_in_a_restore,
    "lose a machine": Injector._lose_a_machine,
    "switch off": Injector._switch_off,
    "switch off in a save": Injector._switch_off_in_a_save,
    "lose two machines": Injector._lose_two_machines,
    "lose a machine at a cut": Injector._lose_at_a_cut,
    "lose a machine at a commit": Injector._lose_at_a_commit,
    "spare": Injector._spare,
    "strike in a re-seed": Injector._strike_in_a_reseed,
    "stop": Injector._stop,
    "stop for long": Injector._stop_for_long,
    "stop for ever": Injector._stop_for_ever,
    "stop a newborn": Injector._stop_a_newborn,
    "hang": Injector._hang,
    "hang in a restore": Injector._hang_in_a_restore,
    "hang in a save": Injector._hang_in_a_save,
    "stranger": Injector._stranger,
    "slow machine": Injector._slow_machine,
    "slow network": Injector._slow_network,
    "full disk": Injector._full_disk,
    "stop and kill": Injector._stop_and_kill,
    "late Hello": Injector._late_hello,
    "jump of the clock": Injector._jump_of_the_clock,
    "save": Injector._save,
}
