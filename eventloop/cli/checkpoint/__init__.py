"""``trainbus checkpoint``: look into checkpoints, verify them, and exchange them with other programs."""

from cyclopts import App

from eventloop.cli.checkpoint import exchange, listing, show

app = App(
    name="checkpoint",
    help="List, verify, show, export and import checkpoints.",
    help_epilogue="Exit status: 0, 1 for a damaged file or one that could not be written, 2 for a mistake in the call.",
)
app.command(listing.ls)
app.command(listing.verify_all, name="verify")
app.command(show.show)
app.command(exchange.export)
app.command(exchange.import_, name="import")
