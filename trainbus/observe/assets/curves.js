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

/** Keep both ends, and of each `width` iterations the least value, the greatest and the first null: extremes() in observe/curves.py. */
function thin(x, y, width) {
  const kept = new Set([0, x.length - 1]), bin = index => Math.floor(x[index] / width);
  for (let start = 0, index = 0; start < x.length; start = index) {
    let least = -1, greatest = -1, bad = -1;
    for (; index < x.length && bin(index) === bin(start); index++) {
      if (y[index] === null) bad = bad < 0 ? index : bad;
      else {
        if (least < 0 || y[index] < y[least]) least = index;
        if (greatest < 0 || y[index] > y[greatest]) greatest = index;
      }
    }
    for (const one of [least, greatest, bad]) if (one >= 0) kept.add(one);
  }
  const keep = (_, index) => kept.has(index);
  return [x.filter(keep), y.filter(keep)];
}
