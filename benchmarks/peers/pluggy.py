"""pluggy: a hook specification and one plugin per handler; hooks are called with keywords."""

from collections.abc import Mapping

import pluggy

from benchmarks.peers import Statement

hookspec = pluggy.HookspecMarker("benchmarks")
hookimpl = pluggy.HookimplMarker("benchmarks")


class OneEvent:
    @hookspec
    def after_train_iter(self, event: object) -> None: ...


class Fields:
    @hookspec
    def after_train_iter(self, run: object, progress: object, batch_idx: int, batch: object, outputs: object) -> None: ...


class NoOp:
    @hookimpl
    def after_train_iter(self, event: object) -> None:
        pass


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    manager = pluggy.PluginManager("benchmarks")
    manager.add_hookspecs(OneEvent if handlers else Fields)
    for _ in range(handlers):
        manager.register(NoOp())
    arguments = "event=event" if handlers else "run=run, progress=progress, batch_idx=0, batch=None, outputs=None"
    return Statement(f"plugins.hook.after_train_iter({arguments})", {**names, "plugins": manager})
