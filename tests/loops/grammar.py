"""The grammar of training programs, for hypothesis. Each of :data:`FEATURES` can be left out by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from .kit import Strike
from .programs import Line, Program

FEATURES = (
    # what stands between the loops of an epoch, and in them
    "mark", "draw", "schedule", "rate", "weights", "reads", "best", "print", "mean", "judge",
    "kept values",
    # loops
    "validation first", "validation between", "validation last", "validation in body", "break in validation", "two trains",
    "max_iters", "epoch of iterations", "drive", "enumerate", "islice", "zip", "block", "break", "continue",
    "numbered from start", "next", "next in a range", "test", "passes", "sometimes",
    # data
    "permutation", "range", "list", "own generator", "shuffled validation", "random rows", "augmented",
    "new loader", "new list", "loader by epoch",
    # updates
    "two optimizers", "accumulation", "declared accumulation", "scaler", "two steps", "adam", "dropout", "batch norm",
    "update in a condition", "target", "anchor", "step outside",
    # hooks
    "save by iteration", "save by epoch", "save best", "no last save", "checkpoint now", "average", "schedule hook", "listener",
    "few files", "overlap",
    # strikes
    "die", "fail", "stop", "thread", "term", "save", "strike at an event", "again",
)  # fmt: skip

STRIKES = ("die", "fail", "stop", "thread", "term", "save")

EVENTS = (
    "before_train", "before_train_epoch", "before_train_iter", "after_train_iter", "after_train_epoch", "before_val",
    "before_val_iter", "after_val_iter", "after_val_epoch", "after_val", "checkpoint_staged", "after_train",
    "before_save_checkpoint", "before_run", "after_run", "after_load_checkpoint", "before_optimizer_step",
    "after_optimizer_step", "before_test", "after_test", "checkpoint_committed",
)  # fmt: skip

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Scene:
    """What a place in a program can use."""

    net: str = "net"
    counter: bool = False
    """Whether ``number`` counts the batches."""
    in_batch: bool = False
    window: int = 0
    """Batches of the accumulation window that the loop declares."""


@dataclass
class Writer:
    """Writes one program by hypothesis' draws."""

    draw: Draw
    on: frozenset[str]
    strikes: list[Strike] = field(default_factory=list)
    ticks: int = 0
    validates: bool = False

    def some(self, *features: str) -> list[str]:
        return [name for name in features if name in self.on]

    def maybe(self, feature: str) -> bool:
        return feature in self.on and self.draw(st.booleans())

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[0] if len(choices) == 1 else self.draw(st.sampled_from(choices))

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    # -------------------------------------------------------------------------------------------------- simple lines

    def simple(self, scene: Scene) -> list[Line]:
        """Write up to two lines that can stand anywhere."""
        kinds = self.some("mark", "draw", "schedule", "rate", "weights", "reads", "kept values")
        if not scene.in_batch:
            kinds += self.some("checkpoint now")
        kinds += ["strike"] if self.on & {*STRIKES} else []
        if not kinds:
            return []
        out: list[Line] = []
        for _ in range(self.number(0, 2)):
            kind = self.one(kinds)
            out += getattr(self, f"_{kind.replace(' ', '_')}")(scene)
        return out

    def _mark(self, scene: Scene) -> list[Line]:
        return [Line('keep["line {n}"] += 1', "mark")]

    def _draw(self, scene: Scene) -> list[Line]:
        source = self.one(["float(torch.rand(()))", "np.random.rand()", "random.random()"])
        return [Line(f'keep["drawn"] += {source}', "draw")]

    def _schedule(self, scene: Scene) -> list[Line]:
        return [Line("schedule.step()", "schedule")]

    def _rate(self, scene: Scene) -> list[Line]:
        return [Line('optimizer.param_groups[0]["lr"] *= 0.9', "rate")]

    def _weights(self, scene: Scene) -> list[Line]:
        if "overlap" not in self.on:
            return [Line("net[0].bias.data.add_(0.01 * torch.randn(4))", "weights")]
        change = Line("net[0].bias.add_(0.01 * torch.randn(4))", "changed while copied")  # which torch counts, unlike `.data`
        return [Line("with torch.no_grad():", "weights", (change,))]

    def _reads(self, scene: Scene) -> list[Line]:
        return [
            Line('optimizer.param_groups[0]["lr"] = 0.1 / (1 + keep["begun"])', "reads"),
            Line('keep["begun"] += 1', "reads"),
        ]

    def _kept_values(self, scene: Scene) -> list[Line]:
        lines = ["kept.count += 1", "kept.drawn += kept.generator.random()", "kept.memory += torch.rand(3)"]
        return [Line(self.one(lines), "kept values")]

    def _checkpoint_now(self, scene: Scene) -> list[Line]:
        return [Line("run.checkpoints.save()", "checkpoint now")]

    def _strike(self, scene: Scene) -> list[Line]:
        if len(self.strikes) >= 3:
            return []
        return [Line(f"strike({self._planned()})", "strike")]

    def _planned(self) -> int:
        kind = self.one(self.some(*STRIKES))
        life = len(self.strikes) and self.number(0, len(self.strikes))
        self.strikes.append(Strike(kind, life, self.number(1, 5)))
        return len(self.strikes) - 1

    def condition(self, scene: Scene, least: int = 0) -> str:
        """Write a condition on the place in the training."""
        modulo = self.number(2, 3)
        rest = self.number(0, modulo - 1)
        places = ["run.progress.batch_idx", "run.progress.iter"] + (["number"] if scene.counter else [])
        return f"{self.one(places)} % {modulo} == {rest}"

    # ------------------------------------------------------------------------------------------------------ validation

    def validation(self, scene: Scene, feature: str) -> list[Line]:
        self.validates = True
        body = [Line("run.report(error=mse_loss(net(inputs), targets))")]
        if self.maybe("draw"):
            body += self._draw(scene)
        if self.on & {*STRIKES} and self.draw(st.booleans()):
            body += self._strike(scene)
        broken = self.maybe("break in validation")
        if broken:
            body += [Line("break", "break in validation")]
        out = [
            Line("validation = run.validate(held_out)", feature),
            Line("for inputs, targets in validation:", feature, tuple(body)),
        ]
        if self.maybe("best") and not broken:
            out.append(Line('keep["best"] = max(keep["best"], validation.metrics.get("error", 0))', "best"))
        if self.maybe("judge") and not broken:
            low = Line('optimizer.param_groups[0]["lr"] /= 2', "judge")
            out.append(Line('if validation.metrics["error"] > 0.5:', "judge", (low,)))
        return out

    # -------------------------------------------------------------------------------------------------------- training

    def train(self, first: bool) -> list[Line]:
        """Write a loop over ``run.train``, in one of its forms."""
        scene = Scene(in_batch=True)
        data, unpack = self.data()
        options = ", endless=True" if "epoch of iterations" in self.on else ""
        if self.maybe("declared accumulation"):
            scene.window = self.number(2, 3)
            options += f", accumulate={scene.window}"
        call = f"run.train({data}{options})"
        names = "inputs, targets" if not unpack else "i"
        forms = ["plain", *self.some("enumerate", "islice", "zip", "block", "numbered from start", "next", "next in a range")]
        form = self.one(forms)
        if "epoch of iterations" in self.on and form in ("islice", "zip"):
            form = "plain"
        target, iterable = names, call
        before: list[Line] = []
        if form == "numbered from start":
            scene.counter = True
            before = [Line(f"batches = {call}", form)]
            target = f"number, ({names})" if not unpack else "number, i"
            iterable = "enumerate(batches, start=batches.start + 1)"
        elif form.startswith("next"):
            before = [Line(f"batches = iter({call})", form)]
            unpack = [Line(f"{names} = batch"), *unpack]
        elif form == "enumerate":
            scene.counter = True
            target, iterable = (f"number, ({names})" if not unpack else "number, i"), f"enumerate({call}, start=1)"
        elif form == "islice":
            iterable = f"islice({call}, {self.number(2, 3)})"
        elif form == "zip":
            scene.counter = True
            target = f"({names}), number" if not unpack else "i, number"
            iterable = f"zip({call}, range({self.number(2, 3)}))"
        elif form == "block":
            iterable = "batches"
        body = tuple(unpack + self.batch(scene, first))
        head = f"for {target} in {iterable}:"
        if form == "next":
            head = "while (batch := next(batches, None)) is not None:"
        elif form == "next in a range":
            head = f"for number in range({self.number(2, 4)}):"
            body = (Line("if (batch := next(batches, None)) is None:", "", (Line("break"),)), *body)
            scene.counter = True
        loop = Line(head, "" if form == "plain" else form, body)
        if form == "block":
            loop = Line(f"with {call} as batches:", "block", (loop,))
        return [*before, loop]

    def data(self) -> tuple[str, list[Line]]:
        loaders = {
            "loader": "loader",
            "own generator": "generated",
            "list": "pairs",
            "new loader": "DataLoader(data, batch_size=4, shuffle=True)",
            "new list": "[(x[rows], y[rows]) for rows in torch.randperm(12).split(4)]",
            "loader by epoch": "(loader, pairs)[epoch % 2]",
        }
        kind = self.one(["loader", *self.some(*[*loaders][1:], "permutation", "range", "random rows")])
        if kind in loaders:
            return loaders[kind], []
        rows = {"permutation": "perm[i : i + 3]", "range": "slice(i, i + 3)", "random rows": "torch.randint(12, (3,))"}[kind]
        return "range(0, 12, 3)", [Line(f"rows = {rows}", kind), Line("inputs, targets = x[rows], y[rows]", kind)]

    def batch(self, scene: Scene, first: bool) -> list[Line]:
        """Write the body for one batch."""
        out: list[Line] = self.simple(scene)
        out += self.validation_in(scene)
        out += [self.leave(scene, leave) for leave in self.some("break", "continue") if self.draw(st.booleans())]
        if self.maybe("update in a condition"):
            out.append(self.under(scene, self.update(scene, first), "update in a condition"))
        else:
            out += self.update(scene, first)
        if "mean" in self.on and first:
            out.append(Line("losses.append(loss.item())", "mean"))
        out += self.simple(scene)
        if held := self.validation_in(scene):
            out += held + self.simple(scene)
        for leave in self.some("break", "continue"):
            if self.draw(st.booleans()):
                out += [self.leave(scene, leave), *self.simple(scene)]
        return out

    def validation_in(self, scene: Scene) -> list[Line]:
        if self.maybe("validation in body"):
            return [self.under(scene, self.validation(scene, "validation in body"))]
        return []

    def under(self, scene: Scene, lines: list[Line], feature: str = "") -> Line:
        return Line(f"if {self.condition(scene)}:", feature, tuple(lines))

    def leave(self, scene: Scene, feature: str) -> Line:
        if feature == "continue":
            return self.under(scene, [Line("continue", "continue")])
        place = "number" if scene.counter and self.draw(st.booleans()) else "run.progress.batch_idx"
        return Line(f"if {place} == {self.number(1, 2)}:", "break", (Line("break", "break"),))

    def update(self, scene: Scene, first: bool) -> list[Line]:
        name, optimizer = "loss", "optimizer"
        value = "mse_loss(net(inputs), targets)"
        if "target" in self.on and self.draw(st.booleans()):
            value = "mse_loss(net(inputs), targets + target(inputs).detach())"
        elif self.maybe("anchor"):
            value = "mse_loss(net(inputs), targets) + (net[0].weight - anchor).square().sum()"
        if "two optimizers" in self.on and not first:
            name, optimizer, value = "critic_loss", "critic_optimizer", "mse_loss(critic(inputs), net(inputs).detach())"
        out = self.step(scene, name, optimizer, value)
        if "two optimizers" in self.on and first and self.draw(st.booleans()):
            other = self.step(scene, "critic_loss", "critic_optimizer", "mse_loss(critic(inputs), net(inputs).detach())")
            out += [self.under(scene, other, "two optimizers")] if self.draw(st.booleans()) else other
        return out

    def step(self, scene: Scene, name: str, optimizer: str, value: str) -> list[Line]:
        zero, loss = Line(f"{optimizer}.zero_grad()"), Line(f"{name} = {value}")
        backward, step, report = Line(f"{name}.backward()"), Line(f"{optimizer}.step()"), Line(f"run.report({name}={name})")
        if optimizer == "optimizer" and self.maybe("scaler"):
            backward = Line(f"scaler.scale({name}).backward()", "scaler")
            steps = [Line(f"scaler.step({optimizer})", "scaler"), Line("scaler.update()", "scaler")]
        else:
            steps = [step]
        if scene.window or self.maybe("accumulation"):
            window = scene.window or self.number(2, 3)
            places = ["(run.progress.batch_idx + 1)", *(["number"] if scene.counter else [])]
            if not scene.window:  # which is within the epoch
                places.append("(run.progress.iter + 1)")
            place = self.one(places)
            kind = "declared accumulation" if scene.window else "accumulation"
            due = Line(f"if {place} % {window} == 0:", kind, (*steps, zero))
            return [loss, backward, due, report]
        out = [zero, loss, backward, *steps]
        if self.on & {"accumulation", "declared accumulation"}:  # whose windows would begin with what this step leaves
            out = [loss, backward, *steps, zero]
        if self.maybe("two steps"):
            out += [Line(one.text, "two steps") for one in out]
        return [*out, report]

    # ----------------------------------------------------------------------------------------------------------- epoch

    def epoch(self) -> list[Line]:
        scene = Scene()
        out = self.simple(scene)
        at = len(out)
        if self.on & {"print", "mean"}:
            out.append(Line("loss = torch.zeros(())"))  # or it is that of an earlier epoch, where no body updates
        if "mean" in self.on:
            out.append(Line("losses = []", "mean"))
        out += self.simple(scene)
        if self.maybe("validation first"):
            out += [*self.validation(scene, "validation first"), *self.simple(scene)]
        train = [*self.train(first=True), *self.simple(scene)]
        if self.maybe("passes"):
            train = [Line("for _ in range(2):", "passes", tuple(train))]
        out += train
        if "two trains" in self.on:
            if self.maybe("validation between"):
                out += [*self.validation(scene, "validation between"), *self.simple(scene)]
            second = self.train(first=False)
            out += [*second[:-1], Line(second[-1].text, "two trains", second[-1].body), *self.simple(scene)]
        if self.maybe("validation last"):
            last = [*self.validation(scene, "validation last"), *self.simple(scene)]
            if self.maybe("sometimes"):
                place = self.one(["epoch", 'int(keep["begun"])'])
                last = [Line(f"if {place} % 2 == 1:", "sometimes", tuple(last))]
            out += last
        if self.maybe("test"):
            report = Line("run.report(error=mse_loss(net(inputs), targets))")
            out += [Line("for inputs, targets in run.test(held_out):", "test", (report,)), *self.simple(scene)]
        if self.maybe("step outside"):
            out += [Line(text, "step outside") for text in ("optimizer.zero_grad()", "mse_loss(net(x), y).backward()")]
            out += [Line("optimizer.step()", "step outside"), Line("optimizer.zero_grad()", "step outside")]
        if "print" in self.on:
            out.append(Line('say("loss", epoch, loss.item())', "print"))
        if "mean" in self.on:
            out.append(Line('say("mean", epoch, sum(losses) / len(losses))', "mean"))
        used = " ".join(line.text for top in out for line in top.walk())
        if "perm[" in used:
            out.insert(at, Line("perm = torch.randperm(12)", "permutation"))
        if "anchor)" in used:
            out.insert(at, Line("anchor = net[0].weight.detach().clone()", "anchor"))
        if "target(" in used:
            out.insert(at, Line("target.load_state_dict(net.state_dict())", "target"))
        return out + self.simple(scene)

    def driven(self) -> list[Line]:
        """Write a loop of calls of ``run.drive()``."""
        scene, batch = Scene(), Scene(in_batch=True)
        epochs = self.number(2, 3)
        ends = [Line("drive.abandon_epoch()"), Line("break")]
        body = [
            Line("drive.begin_iteration(batch)"),
            Line("inputs, targets = batch"),
            *self.simple(batch),
            *self.validation_in(batch),
            *self.update(batch, first=True),
            *self.simple(batch),
            *self.validation_in(batch),
            Line("drive.end_iteration()"),
            *self.simple(scene),
            Line("if drive.should_stop():", "", tuple(ends)),
        ]
        tail, judge, begin = [Line("drive.end_epoch()"), *self.simple(scene)], list[Line](), list[Line]()
        if self.maybe("validation last"):
            held = [*self.validation(scene, "validation last"), *self.simple(scene)]
            judge = [Line("def judge(epoch):", "", tuple(held))]
            begin = [Line("if drive.validation_comes_first:", "", (Line("judge(run.progress.epoch - 1)"),))]
            tail.append(Line("judge(epoch)"))
        tail.append(Line("epoch += 1"))
        lines = [
            *self.simple(scene),
            Line("for batch in drive.begin_epoch(loader):", "", tuple(body)),
            Line("else:", "", tuple(tail)),
        ]
        return [
            *judge,
            Line("drive = run.drive()", "drive"),
            Line(f"drive.begin_train(max_epochs={epochs})"),
            *begin,
            Line("epoch = run.progress.epoch"),
            Line(f"while epoch < {epochs} and not drive.should_stop():", "", tuple(lines)),
            Line("drive.end_train()"),
        ]

    def program(self) -> Program:
        if "drive" in self.on:
            return self.whole(self.driven())
        epoch = self.epoch()
        if "max_iters" in self.on or "epoch of iterations" in self.on:
            limit = f"max_iters={self.number(5, 9)}"
        else:
            limit = self.number(2, 3)
        return self.whole([Line(f"for epoch in run.epochs({limit}):", "", tuple(epoch))])

    def whole(self, loop: list[Line]) -> Program:
        """Write the program around a loop."""
        several = "two optimizers" in self.on or "target(" in " ".join(line.text for top in loop for line in top.walk())
        hooks = self.hooks(several=several)
        listeners = self.listeners()
        used = " ".join(line.text for top in loop for line in top.walk())
        setup = [Line(text) for text, name in self.setup() if name is None or name in used or name in self.on]
        named = ["net", *self.some("two optimizers")]
        models = ["net", *(["critic"] * ("two optimizers" in self.on)), *(["target"] * ("target(" in used))]
        model = "{" + ", ".join(f'"{name}": {name}' for name in models) + "}" if len(models) > 1 else "net"
        optimizer = '{"optimizer": optimizer, "critic_optimizer": critic_optimizer}' if len(named) == 2 else "optimizer"
        parts = ["net", "optimizer", "keep"]
        parts += ["critic", "critic_optimizer"] if len(named) == 2 else []
        parts += ["target"] if "target" in models else []
        stateful = {"keep": "keep"}
        if "schedule" in self.on and "schedule hook" not in self.on:
            stateful["schedule"] = "schedule"
        parts += ["schedule"] if self.on & {"schedule", "schedule hook"} else []
        if "scaler" in self.on:
            stateful["scaler"] = "scaler"
            parts.append("scaler")
        state = ", ".join(f'"{name}": {value}' for name, value in stateful.items())
        keeps, ends = list[Line](), list[Line]()
        if "kept." in used:
            values = "count=0, drawn=0.0, generator=np.random.default_rng(0), memory=torch.zeros(3)"
            keeps = [Line(f"kept = run.keep({values})", "kept values")]
            ends = [Line('keep["kept"] = kept.count + kept.drawn + kept.memory.sum().item() + kept.generator.random()')]
        arguments = f"model={model}, optimizer={optimizer}, work_dir=folder, stateful={{{state}}}"
        run = Line(f'with tb.Run(bus, {arguments}, resume="auto") as run:', "", (Line("strike.run = run"), *keeps, *loop))
        made = (*setup, *hooks, *listeners)
        return Program(made, (run, *ends), tuple(self.strikes), tuple(parts), again="again" in self.on)

    def setup(self) -> list[tuple[str, str | None]]:
        """Write the lines that make the parts, with a text of the loop that needs each."""
        norm, dropout = ["nn.BatchNorm1d(4)"] * ("batch norm" in self.on), ["nn.Dropout(0.3)"] * ("dropout" in self.on)
        layers = ", ".join(["nn.Linear(4, 4)", *norm, "nn.Tanh()", *dropout, "nn.Linear(4, 1)"])
        optimizer = "Adam(net.parameters(), lr=0.05)" if "adam" in self.on else "SGD(net.parameters(), lr=0.1, momentum=0.9)"
        shuffled, scales = "shuffled validation" in self.on, "scaler" in self.on and self.draw(st.booleans())
        schedules = self.on & {"schedule", "schedule hook"}
        return [
            ("x = torch.randn(12, 4)", None),
            ("y = x.sum(1, keepdim=True)", None),
            (f"data = {'Augmented' if 'augmented' in self.on else 'TensorDataset'}(x, y)", None),
            ("loader = DataLoader(data, batch_size=3, shuffle=True)", "loader"),
            ("own = torch.Generator().manual_seed(1)", "generated"),
            ("generated = DataLoader(data, batch_size=3, shuffle=True, generator=own)", "generated"),
            ("pairs = [(x[i : i + 3], y[i : i + 3]) for i in range(0, 12, 3)]", "pairs"),
            (f"held_out = DataLoader(data, batch_size=6, shuffle={shuffled})", "held_out"),
            (f"net = nn.Sequential({layers})", None),
            (f"optimizer = torch.optim.{optimizer}", None),
            (f"target = nn.Sequential({layers})", "target("),
            ("critic = nn.Linear(4, 1)", "two optimizers"),
            ("critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)", "two optimizers"),
            *([("schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)", None)] if schedules else []),
            (f'scaler = torch.amp.GradScaler("cpu", enabled={scales}, init_scale=4.0, growth_interval=2)', "scaler"),
            ("keep, say = Kept(), Said(folder)", None),
        ]

    def hooks(self, *, several: bool) -> list[Line]:
        hooks = []
        options = {True: "by_epoch=False", False: "by_epoch=True"}
        saves = self.some("save by epoch", "save by iteration")
        for kind in saves:
            by_iter = kind == "save by iteration"
            name = ', name="other"' if hooks else ""
            best = ', save_best="error", rule="less"' if self.validates and not hooks and self.maybe("save best") else ""
            last = ", save_last=False" if self.maybe("no last save") else ""
            interval = self.number(1, 5 if by_iter else 2)
            last += ", max_keep_ckpts=1" if self.maybe("few files") else ""
            last += ', staging="overlap"' if self.maybe("overlap") else ""
            hooks.append((f"tb.CheckpointHook(interval={interval}, {options[by_iter]}{last}{best}{name})", kind))
        if not saves and self.validates and self.maybe("save best"):
            hooks.append(('tb.CheckpointHook(save_last=False, save_best="error", rule="less")', "save best"))
        if any(one.kind == "term" for one in self.strikes):
            hooks.append(("tb.PreemptionHook()", ""))
        if "average" in self.on:
            model = ', model="net"' if several else ""
            hooks.append((f'tb.EMAHook("ExponentialMovingAverage", momentum=0.5{model})', "average"))
        if "schedule hook" in self.on:
            by = self.one(["iter"] if "epoch of iterations" in self.on else ["iter", "epoch"])
            hooks.append((f'tb.ParamSchedulerHook(schedule, by="{by}")', "schedule hook"))
        hooks.append(("tb.LoggerHook(interval=1, writers=[tb.JSONLinesWriter()])", ""))
        return [Line("bus = tb.Bus("), *(Line(f"    {text},", feature) for text, feature in hooks), Line(")")]

    def listeners(self) -> list[Line]:
        out = []
        if "listener" in self.on:
            out.append(Line(f'bus.on("{self.one(EVENTS)}", lambda event: None)', "listener"))
        kinds = self.some(*STRIKES)
        if kinds and self.maybe("strike at an event") and len(self.strikes) < 3:
            if not any(one.kind == "term" for one in self.strikes):
                kinds = [kind for kind in kinds if kind != "term"]
            if kinds:
                life = len(self.strikes) and self.number(0, len(self.strikes))
                self.strikes.append(Strike(self.one(kinds), life, self.number(1, 5)))
                event = self.one(EVENTS)
                if event == "checkpoint_committed" and self.strikes[-1].kind in ("die", "fail"):
                    event = "checkpoint_staged"  # the other one comes on the thread that writes
                out.append(Line(f'bus.on("{event}", strike.on({len(self.strikes) - 1}))', "strike at an event"))
        return out


@st.composite
def programs(draw: Draw, without: Collection[str] = (), also: Collection[str] = ()) -> Program:
    """Return programs that have some of the features, but for those ``without`` which they are; and those of ``also``."""
    if unknown := {*without, *also} - {*FEATURES}:
        raise ValueError(f"the grammar has no features {sorted(unknown)}")
    possible = [name for name in FEATURES if name not in without]
    some = st.lists(st.sampled_from(possible), unique=True, max_size=14)  # two lists: hypothesis draws mostly short ones
    on = {*draw(some), *draw(some)}
    strikes = [name for name in STRIKES if name in possible]
    if strikes and not on & set(strikes):
        on.add(draw(st.sampled_from(strikes)))
    saves = [name for name in ("save by epoch", "save by iteration") if name in possible]
    if saves and not on & {*saves, "save best"}:
        on.add(draw(st.sampled_from(saves)))
    if "schedule hook" in on:
        on.discard("schedule")
    if "epoch of iterations" in on and "drive" not in on:  # where a hook that counts epochs is an error
        on = {"save by iteration" if name == "save by epoch" else name for name in on}
    return Writer(draw, frozenset({*on, *also})).program()
