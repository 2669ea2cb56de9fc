"""The built-in hooks. They use only public names of ``eventloop``."""

from hooks.alerts import Alert, AlertHook
from hooks.autograd import AutogradAnomalyDetectHook, AutogradProfilerHook
from hooks.averages import ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage, WarmupEMA, WeightAverage
from hooks.check_loss import CheckInvalidLossHook
from hooks.checkpoint import CheckpointHook
from hooks.compat import register_other_systems
from hooks.compat.transformers_guests import TransformersHook
from hooks.dashboard import Dashboard
from hooks.distributed import DistSamplerSeedHook, SyncBuffersHook
from hooks.early_stopping import EarlyStoppingHook
from hooks.ema import EMAEpochHook, EMAHook, EMAIterHook
from hooks.empty_cache import EmptyCacheHook
from hooks.evaluate import Evaluated, EvaluateHook
from hooks.heartbeat import HeartbeatHook
from hooks.logger import LoggerHook
from hooks.lr_sweep import LRSweepHook
from hooks.optimizer import Fp16OptimizerHook, OptimizerHook
from hooks.preemption import PreemptionHook, SignalDoor
from hooks.profiler import ProfilerHook
from hooks.progress_bar import ProgressBar
from hooks.ray_train import RayTrainHook
from hooks.run_record import RunRecordHook
from hooks.runtime_info import RuntimeInfoHook
from hooks.schedule import ParamSchedulerHook
from hooks.timer import IterTimerHook
from hooks.trace import TraceHook
from hooks.writers import ConsoleWriter, CSVWriter, JSONLinesWriter, MLflowWriter, TensorBoardWriter, WandbWriter, Writer

__all__ = [
    "Alert",
    "AlertHook",
    "AutogradAnomalyDetectHook",
    "AutogradProfilerHook",
    "CSVWriter",
    "CheckInvalidLossHook",
    "CheckpointHook",
    "ConsoleWriter",
    "Dashboard",
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
    "RayTrainHook",
    "RunRecordHook",
    "RuntimeInfoHook",
    "SignalDoor",
    "StochasticWeightAverage",
    "SyncBuffersHook",
    "TensorBoardWriter",
    "TraceHook",
    "TransformersHook",
    "WandbWriter",
    "WarmupEMA",
    "WeightAverage",
    "Writer",
]

register_other_systems()
