// Shared by the report and the dashboard.

// As hooks.smoothing.STATES: what is set and not measured is drawn as it is, in steps.
const isState = name => /(^|\/)(([^\/]*[-_])?(lr|learning_rate)([-_][^\/]*)?|momentum|weight_decay|loss_scale|eta)(\/|$)/.test(name);

// As stage_and_name() in observe/curves.py: scalars of one name share a chart.
const STAGE = /^(train(?:ing)?|val(?:id(?:ation)?)?|eval|test)[/_.-](.+)$/;
function stageAndName(name, stage) {
  for (let found; (found = STAGE.exec(name));) [stage, name] = [{ tr: "train", te: "test" }[found[1].slice(0, 2)] ?? "val", found[2]];
  return [stage, name];
}

/** Return the exponential mean of values; null stays null. */
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map(value => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
