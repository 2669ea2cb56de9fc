"""The built-in hooks. They use only public names of ``eventloop``."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.hooks.autograd import AutogradAnomalyDetectHook, AutogradProfilerHook
    from trainbus.hooks.averages import (
        ExponentialMovingAverage,
        MomentumAnnealingEMA,
        StochasticWeightAverage,
        WarmupEMA,
        WeightAverage,
    )
    from trainbus.hooks.check_loss import CheckInvalidLossHook
    from trainbus.hooks.checkpoint import CheckpointHook
    from trainbus.hooks.distributed import DistSamplerSeedHook, SyncBuffersHook
    from trainbus.hooks.early_stopping import EarlyStoppingHook
    from trainbus.hooks.ema import EMAEpochHook, EMAHook, EMAIterHook
    from trainbus.hooks.empty_cache import EmptyCacheHook
    from trainbus.hooks.evaluate import Evaluated, EvaluateHook
    from trainbus.hooks.heartbeat import HeartbeatHook
    from trainbus.hooks.logger import LoggerHook
    from trainbus.hooks.lr_sweep import LRSweepHook
    from trainbus.hooks.optimizer import Fp16OptimizerHook, OptimizerHook
    from trainbus.hooks.preemption import PreemptionHook, SignalDoor
    from trainbus.hooks.profiler import ProfilerHook
    from trainbus.hooks.progress_bar import ProgressBar
    from trainbus.hooks.runtime_info import RuntimeInfoHook
    from trainbus.hooks.schedule import ParamSchedulerHook
    from trainbus.hooks.timer import IterTimerHook
    from trainbus.hooks.writers import (
        ConsoleWriter,
        CSVWriter,
        JSONLinesWriter,
        MLflowWriter,
        TensorBoardWriter,
        WandbWriter,
        Writer,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "AutogradAnomalyDetectHook",
    "AutogradProfilerHook",
    "CSVWriter",
    "CheckInvalidLossHook",
    "CheckpointHook",
    "ConsoleWriter",
    "DistSamplerSeedHook",
    "EMAEpochHook",
    "EMAHook",
    "EMAIterHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "EvaluateHook",
    "Evaluated",
    "ExponentialMovingAverage",
    "Fp16OptimizerHook",
    "HeartbeatHook",
    "IterTimerHook",
    "JSONLinesWriter",
    "LRSweepHook",
    "LoggerHook",
    "MLflowWriter",
    "MomentumAnnealingEMA",
    "OptimizerHook",
    "ParamSchedulerHook",
    "PreemptionHook",
    "ProfilerHook",
    "ProgressBar",
    "RuntimeInfoHook",
    "SignalDoor",
    "StochasticWeightAverage",
    "SyncBuffersHook",
    "TensorBoardWriter",
    "WandbWriter",
    "WarmupEMA",
    "WeightAverage",
    "Writer",
]
