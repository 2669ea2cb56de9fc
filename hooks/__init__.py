"""trainbus, the policy: what happens at the mount points. Built on the public names of ``eventloop`` only.

===========================  ========================================================================
hook                         does
===========================  ========================================================================
:class:`OptimizerHook`       zero_grad, backward, clip, step; accumulation; mixed precision
:class:`ParamSchedulerHook`  steps learning-rate schedules by iteration, epoch or metric
:class:`EMAHook`             averaged weights for validation, test and checkpoints
:class:`RuntimeInfoHook`     facts of the run in ``run.info``
:class:`IterTimerHook`       time per iteration and per batch, time left
:class:`LoggerHook`          scalars and images to writers: the terminal, JSON lines, CSV, TensorBoard, W&B, MLflow
:class:`ProgressBar`         the progress of a run on a terminal
:class:`CheckInvalidLossHook` ends a run whose loss is no longer finite
:class:`CheckpointHook`      saves, keeps the newest and the best
:class:`DistSamplerSeedHook` another order of the data in every epoch, on all ranks alike
:class:`SyncBuffersHook`     the same buffers on all ranks
:class:`EmptyCacheHook`      gives unused memory back to the device
:class:`EarlyStoppingHook`   ends training when validations stop getting better
:class:`ProfilerHook`        torch's profiler over the first epochs or iterations
:class:`AutogradProfilerHook` a trace of each iteration that you choose
:class:`AutogradAnomalyDetectHook` names the operation that a NaN gradient comes from
:class:`EvaluateHook`        calls a function of yours every so often, keeps the best result
:class:`EMAIterHook`         the average that a model keeps itself, after each update
:class:`EMAEpochHook`        the same, after each epoch
:class:`PreemptionHook`      on a signal: saves, and ends the run in order
===========================  ========================================================================
"""

from hooks.autograd import AutogradAnomalyDetectHook, AutogradProfilerHook
from hooks.averages import ExponentialMovingAverage, MomentumAnnealingEMA, StochasticWeightAverage, WeightAverage
from hooks.check_loss import CheckInvalidLossHook
from hooks.checkpoint import CheckpointHook
from hooks.compat import register_other_systems
from hooks.early_stopping import EarlyStoppingHook
from hooks.ema import EMAHook
from hooks.empty_cache import EmptyCacheHook
from hooks.evaluate import Evaluated, EvaluateHook
from hooks.logger import LoggerHook
from hooks.model_ema import EMAEpochHook, EMAIterHook
from hooks.optimizer import Fp16OptimizerHook, OptimizerHook
from hooks.preemption import PreemptionHook
from hooks.profiler import ProfilerHook
from hooks.progress_bar import ProgressBar
from hooks.runtime_info import RuntimeInfoHook
from hooks.sampler_seed import DistSamplerSeedHook
from hooks.schedule import ParamSchedulerHook
from hooks.sync_buffers import SyncBuffersHook
from hooks.timer import IterTimerHook
from hooks.writers import ConsoleWriter, CSVWriter, JSONLinesWriter, MLflowWriter, TensorBoardWriter, WandbWriter, Writer

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
    "IterTimerHook",
    "JSONLinesWriter",
    "LoggerHook",
    "MLflowWriter",
    "MomentumAnnealingEMA",
    "OptimizerHook",
    "ParamSchedulerHook",
    "PreemptionHook",
    "ProfilerHook",
    "ProgressBar",
    "RuntimeInfoHook",
    "StochasticWeightAverage",
    "SyncBuffersHook",
    "TensorBoardWriter",
    "WandbWriter",
    "WeightAverage",
    "Writer",
]

register_other_systems()
