// Shared by the report and the dashboard.

// As hooks.smoothing.STATES: what is set and not measured is drawn as it is, in steps.
const isState = name => /(^|\/)(([^\/]*[-_])?(lr|learning_rate)([-_][^\/]*)?|momentum|weight_decay|loss_scale|eta)(\/|$)/.test(name);

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
