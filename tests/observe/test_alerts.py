"""``AlertHook`` and its webhook, against a real server on this machine."""

import json
import math
import pickle
import socket
import threading
import time

import pytest
import torch

from trainbus.eventloop import Bus, ConfigurationError, Run, RunPreempted
from trainbus.eventloop.events import CostsMeasured, Progress, RanksMeasured
from trainbus.eventloop.plain import command_without_secrets, without_secrets
from trainbus.eventloop.seams import CLOCK
from trainbus.observe import AlertHook, Costs, LaneCosts, RankCosts, Straggler, webhook
from trainbus.observe.webhook import Webhook

from ..hooks.conftest import make_loop
from ..waiting import until
from ..webhooks import SECRET, Server


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch, change):
    change(webhook.FIRST_PAUSE, 0.05)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def dead():
    """The URL of a port on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{one.getsockname()[1]}/{SECRET}"


def train(hook, losses=(1.0, 2.0), each=None, **options):
    """A loop of one's own with these losses, and a validation with the last one."""
    with Run(Bus(hook), model=torch.nn.Linear(1, 1), name="digits", **options) as run:
        for _ in run.epochs(1):
            for i in run.train(range(len(losses))):
                run.report(loss=torch.tensor(losses[i]))
                if each is not None:
                    each(run)
            for _ in run.validate(range(1)):
                run.report(loss=torch.tensor(losses[-1]))
    return run


# ------------------------------------------------------------------------------------------------------- what is told


def test_a_finished_run_posts_one_object_with_its_position_and_metrics(server):
    train(AlertHook(server.url))
    [alert] = server.got
    assert alert["text"] == "digits: the run finished after 1 epoch, 2 iterations"
    assert {name: alert[name] for name in ("kind", "run", "epoch", "iter", "rank", "held_back")} == {
        "kind": "finished",
        "run": "digits",
        "epoch": 1,
        "iter": 2,
        "rank": 0,
        "held_back": 0,
    }
    assert alert["metrics"] == {"train/loss": 2.0, "val/loss": 2.0}
    assert alert["host"] == socket.gethostname()
    assert abs(alert["time"] - time.time()) < 600
    [(path, headers)] = server.heads
    assert (path, headers["Content-Type"]) == (f"/{SECRET}", "application/json")


def test_a_run_that_was_stopped_without_a_reason_says_so(server):
    train(AlertHook(server.url), each=lambda run: run.stop())
    assert server.got[0]["text"] == "digits: the run was stopped after 0 epochs, 1 iteration: run.stop() was called"


def test_a_loss_that_is_not_finite_is_told_once_with_its_iteration(server):
    train(AlertHook(server.url, "nan"), [1.0, math.nan, math.inf])
    [alert] = server.got
    assert (alert["kind"], alert["epoch"], alert["iter"]) == ("nan", 1, 2)
    assert "loss is nan at iteration 2" in alert["message"]
    assert alert["metrics"]["train/loss"] == "nan"


def test_a_validation_loss_that_is_not_finite_is_told(server):
    with Run(Bus(AlertHook(server.url, "nan")), model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            list(run.train(range(2)))
            for _ in run.validate(range(1)):
                run.report(loss=torch.tensor(math.inf))
    [alert] = server.got
    assert "val/loss is inf in the validation after iteration 2" in alert["message"]


def test_alerts_of_a_kind_are_held_back_and_counted(server, change):
    hook, now = AlertHook(server.url, "nan"), [1000.0]
    change(CLOCK, lambda: now[0])

    def later(run):
        if run.state.counters.iter == 3:
            run.bus.drain()
            now[0] += 600.0

    train(hook, [math.nan, math.nan, math.nan, math.nan, 1.0], later)
    assert [(alert["iter"], alert["held_back"]) for alert in server.got] == [(1, 0), (4, 2)]


def test_a_failed_run_tells_the_error_and_escapes_it_in_the_text(server):
    def fail(run):
        raise ValueError("bad <b> & more")

    with pytest.raises(ValueError, match="bad"):
        train(AlertHook(server.url), each=fail)
    server.wait(1)
    [alert] = server.got
    assert (alert["kind"], alert["iter"]) == ("failed", 0)
    assert alert["message"].endswith("ValueError: bad <b> & more")
    assert alert["text"].endswith("ValueError: bad &lt;b&gt; &amp; more")


def test_a_long_error_is_cut(server):
    def fail(run):
        raise ValueError("x" * 10_000)

    with pytest.raises(ValueError, match="x"):
        train(AlertHook(server.url), each=fail)
    assert len(server.wait(1)[0]["message"]) == 2001


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_ctrl_c_and_an_exit_without_a_status_are_told_by_nothing(server, error):
    def interrupt(run):
        raise error

    with pytest.raises(type(error)):
        train(AlertHook(server.url), each=interrupt)
    assert server.got == []


@pytest.mark.parametrize(("exit_code", "kind"), [(0, "finished"), (75, "preempted")])
def test_a_stopped_run_tells_the_reason(server, exit_code, kind):
    stop = lambda run: run.stop("signal SIGTERM", exit_code=exit_code)  # noqa: E731
    if exit_code:
        with pytest.raises(RunPreempted):
            train(AlertHook(server.url), each=stop)
    else:
        train(AlertHook(server.url), each=stop)
    [alert] = server.got
    assert alert["kind"] == kind
    assert alert["message"].endswith(": signal SIGTERM")


def test_a_stall_is_told_once_and_again_after_the_training_has_moved(server):
    def hang(run):
        server.wait(run.state.counters.iter + 1)

    train(AlertHook(server.url, "stall", stall_after=0.2, repeat_after=0.01), [1.0, 1.0], hang)
    assert server.kinds()[:2] == ["stall", "stall"]
    assert [alert["message"].partition(" s, ")[2] for alert in server.got[:2]] == [
        "in epoch 1 after 0 iterations",
        "in epoch 1 after 1 iteration",
    ]


@pytest.mark.long
def test_a_pause_is_no_stall(server):
    def pause(run):
        run.pause()
        threading.Timer(0.6, run.unpause).start()

    train(AlertHook(server.url, ["stall", "finished"], stall_after=0.2), [1.0, 1.0], pause)
    assert server.kinds() == ["finished"]


def lane(**counts):
    return LaneCosts("Slow.after_iter", ["after_iter"], **{"delivered": 1, "failed": 0, "dropped": 0, "pending": 0, **counts})


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ([lane(dropped=3)], "dropped 3 events"),
        ([lane(waited=1.0)], "waited 1 s of 4 s"),
        ([lane(dropped=3, full="latest")], None),
        ([lane(waited=0.1)], None),
    ],
)
def test_a_full_lane_is_told(server, lanes, message):
    costs = Costs(wall=4.0, parts=[], lanes=lanes)
    publish = lambda run: run.bus.publish(CostsMeasured(progress=Progress(iter=7), costs=costs))  # noqa: E731
    train(AlertHook(server.url, "full_lane"), each=publish)
    told = [alert["message"] for alert in server.got]
    assert len(told) == (message is not None)
    assert message is None or message in told[0]


@pytest.mark.long
def test_events_that_a_handler_drops_are_told_by_a_whole_run(server):
    bus, released = Bus(AlertHook(server.url, "full_lane")), threading.Event()
    bus.on("after_train_iter", lambda event: released.wait(60), offload="thread", queue=1, full="drop_new")
    with Run(bus, model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            for i in run.train(range(100_000)):
                if i > 10:
                    time.sleep(0.01)
                if server.got:
                    break
        released.set()
    assert server.kinds() == ["full_lane"]
    assert "dropped" in server.got[0]["message"]


def test_a_slow_rank_is_told(server):
    straggler = Straggler(rank=3, host="node7", group="hook", name="forward", seconds=0.5, others=0.1, waited=0.4)
    ranks = RankCosts(world_size=4, iterations=10, seconds=0.6, times=[], straggler=straggler)
    publish = lambda run: run.bus.publish(RanksMeasured(progress=Progress(iter=7), ranks=ranks))  # noqa: E731
    train(AlertHook(server.url, "slow_rank"), each=publish)
    [alert] = server.got
    assert (alert["kind"], alert["iter"]) == ("slow_rank", 7)
    assert "rank 3 (node7): forward takes 500 ms an iteration there, 100 ms on the others" in alert["message"]


def test_it_measures_and_listens_only_where_it_must(server):
    assert AlertHook(server.url).timing
    hook = AlertHook(server.url, ["nan", "failed"])
    assert not hook.timing
    assert set(hook.unused()) == {"move", "pause"}


# ------------------------------------------------------------------------------------------------------- the webhook


def test_failures_are_tried_again_and_said_once(server, logs):
    server.answers += [500, 503, 429, lambda: None]  # the last one closes the connection
    train(AlertHook(server.url, "finished"))
    assert server.kinds() == ["finished"]
    [line] = [line for line in logs if line.get("id") == "webhook-failed"]
    assert (line["host"], line["error"]) == ("127.0.0.1", "status 500")


@pytest.mark.parametrize("status", [301, 307, 400, 403, 404])
def test_what_the_server_refuses_is_not_tried_again(server, logs, status):
    server.answers.append(status)
    hook = AlertHook(server.url, ["nan", "finished"])
    train(hook, [math.nan, 1.0, 1.0], lambda run: run.state.counters.iter < 2 or until(lambda: not server.answers))
    assert server.kinds() == ["finished"]
    said = {line["event"]: line for line in logs if "alert" in line["event"]}
    assert [line["error"] for line in said.values() if "error" in line] == [f"status {status}"]
    assert said["alerts were not delivered"]["alerts"] == 1


@pytest.mark.long
@pytest.mark.parametrize("where", ["dead", "hangs"])
def test_a_webhook_that_does_not_answer_costs_the_run_its_end_timeout_only(server, dead, logs, where):
    server.answers += [server.released.wait] * 100
    url = dead if where == "dead" else server.url
    run = train(AlertHook(url, end_timeout=0.5), [math.nan] * 3)
    assert run.state.counters.iter == 3
    until(lambda: "trainbus-webhook" not in {thread.name for thread in threading.enumerate()})
    until(lambda: any(line.get("id") == "alerts-not-delivered" for line in logs))
    assert len([line for line in logs if line.get("id") == "webhook-failed"]) == 1
    assert SECRET not in str(logs)
    assert url not in str(logs)


@pytest.mark.long
def test_the_error_of_a_run_is_not_held_up_and_the_exit_waits(server, script):
    server.answers.append(lambda: time.sleep(2))
    done = script(
        f"""
        import torch, time
        from trainbus import AlertHook, Bus, Run

        with Run(Bus(AlertHook({server.url!r})), model=torch.nn.Linear(1, 1)) as run:
            for _ in run.epochs(1):
                for _ in run.train(range(2)):
                    raise ValueError("broken")
        """
    )
    assert done.returncode == 1
    assert "ValueError: broken" in done.stderr
    assert server.kinds() == ["failed"]


def test_the_end_posts_the_newest_message_first(server):
    server.answers += [500]
    webhook = Webhook(server.url)
    for number in range(3):
        webhook.post(json.dumps({"kind": number}).encode())
    until(lambda: not server.answers)
    webhook.post_rest(10, wait=10)
    assert sorted(server.kinds()) == [0, 1, 2]
    assert server.kinds()[-1] != 2


def test_messages_that_wait_are_bounded(dead, logs, monkeypatch):
    webhook = Webhook(dead)
    for _ in range(250):
        webhook.post(b"{}")
    assert len(webhook._waiting) == 100
    webhook.post_rest(0.3, wait=5)
    until(lambda: any(line.get("id") == "alerts-not-delivered" for line in logs))
    assert [line["alerts"] for line in logs if line.get("id") == "alerts-not-delivered"] == [250]


def test_it_goes_through_the_proxy_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    train(AlertHook("http://hooks.invalid/path", "finished"))
    assert [path for path, _ in server.heads] == ["http://hooks.invalid/path"]


# ------------------------------------------------------------------------------------------------------- its options


@pytest.mark.parametrize(
    ("to", "value"),
    [
        (f"ftp://host/{SECRET}", "ftp://host"),
        (SECRET, "no scheme"),
        (f"https:///{SECRET}", "no host"),
        (f"https://host:port/{SECRET}", "port"),
        (f"https://ada:{SECRET[-6:]}@host/x", "user"),
        (f"https://host/{SECRET} x", "blanks"),
        (f"https://host/{SECRET}\nx", "blanks"),
        ("$TRAINBUS_NO_SUCH", "TRAINBUS_NO_SUCH is not set"),
    ],
)
def test_an_address_that_is_none_is_an_error_without_the_secret(to, value):
    with pytest.raises(ConfigurationError, match=value) as error:
        AlertHook(to)
    assert "secret" not in str(error.value)


def test_the_address_may_be_in_a_variable(server, monkeypatch):
    monkeypatch.setenv("MY_HOOK", server.url)
    train(AlertHook("$MY_HOOK", "finished"))
    train(AlertHook("${MY_HOOK}", "finished"))
    assert server.kinds() == ["finished"] * 2


@pytest.mark.parametrize(
    ("when", "value"), [("stal", "'stal'.*'stall'"), ([], "when"), (["nan", "x"], "'x'.*slow_rank"), (3, "when")]
)
def test_an_unknown_occasion_is_an_error(when, value):
    with pytest.raises(ConfigurationError, match=value):
        AlertHook("https://host/x", when)


def test_the_address_is_in_no_record_and_no_repr():
    hook = AlertHook(f"https://hooks.example.org/{SECRET}")
    assert SECRET not in f"{hook!r} {hook._repr_html_()}"
    assert SECRET not in Bus(hook).describe().__repr__()
    url = f"https://hooks.example.org/{SECRET}"
    assert SECRET not in str(command_without_secrets(["trainbus", "run", "a.toml", f"custom_hooks.0.to={url}", f"--to={url}"]))
    config = without_secrets({"hooks": [{"type": "AlertHook", "to": f"https://hooks.example.org/{SECRET}"}, {"to": "cuda"}]})
    assert config == {"hooks": [{"type": "AlertHook", "to": "https://hooks.example.org/(not stored)"}, {"to": "cuda"}]}


def test_a_copy_posts_for_a_run_of_its_own(server):
    hook = AlertHook(server.url, "finished")
    train(pickle.loads(pickle.dumps(hook)))  # noqa: S301
    train(hook)
    assert server.kinds() == ["finished"] * 2


def test_it_works_in_a_loop_of_ours(server):
    make_loop(AlertHook(server.url)).run()
    [alert] = server.got
    assert (alert["kind"], alert["epoch"], alert["iter"]) == ("finished", 2, 8)
    assert list(alert["metrics"]) == ["train/loss"]
