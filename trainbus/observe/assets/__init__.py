"""Files that the report and the dashboard share: colours, rules of curves, and uPlot 1.6.32, which draws them."""
