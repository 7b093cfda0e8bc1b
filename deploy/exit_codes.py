"""Exit codes: what each means, what ends with it, and its cure. Plain data; ``docs/errors.md`` is made of "
"it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protos import refusal


@dataclass(frozen=True)
class ExitCode:
    """A way in which `atoll` ends.

    Attributes:
        code: of the process.
        name: for people and links.
        when: it ends so.
        cure: what to do.
        errors: exceptions that end so, by module and class.
        refusals: kinds of refusals that end so, of protos/refusal.py.
    """

    code: int
    name: str
    when: str
    cure: str
    errors: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


DONE: Final = 0
STOPPED: Final = 1
INTERRUPTED: Final = 130  # after Ctrl-C
_SYSTEM: Final = "system"
_EXCHANGE: Final = "no-exchange"
_LAUNCH: Final = "not-launched"

CODES: Final = (
    ExitCode(
        STOPPED,
        "stopped",
        "a run has ended before its last round, or what was to be checked does not hold (`atoll doctor`, "
        "`atoll audit`, `atoll demo`). With a traceback: a defect of Atoll.",
        "The last lines say why; `atoll doctor` explains logs of events. Please report a traceback.",
    ),
    ExitCode(2, "usage", "an option or argument is not as `--help` says.", "Compare it with `--help`."),
    ExitCode(
        10,
        "bad-run-file",
        "a run file cannot be read, or what it asks for does not go together.",
        "The message names the line, or section and key; `atoll run check FILE` looks at all of it.",
        ("protos.runfile.RunFileError", "optim.role.RoleError", "protos.buckets.BucketTableError"),
    ),
    ExitCode(
        11,
        "bad-invite",
        "a string is no invite, or a part of it is wrong.",
        "Copy the whole of what `atoll coordinator` or `atoll invite create` has printed, in quotes.",
        ("protos.invite.InviteError",),
    ),
    ExitCode(
        12,
        "bad-value",
        "something that was given cannot be used: an address, a size, a folder, a choice of options.",
        "The message says which one, and what would do.",
        ("protos.address.AddressError", "protos.units.UnitError", "deploy.errors.UserError"),
    ),
    ExitCode(
        13,
        _SYSTEM,
        "the system refuses: a port in use, a file that is not there, a full disk; or a Python package is "
        "not installed.",
        "The message names the file, the address or the package. Choose another port, free some space, or "
        "install the extra.",
    ),
    ExitCode(
        14,
        "bad-model",
        "the model of the run file cannot be built here.",
        "See the run file's `[model]`; a model of `hf:` needs the extra `hf` and its files.",
        ("node.language.ModelError",),
    ),
    ExitCode(
        15,
        "bad-data",
        "the text or the tokens cannot be read, or are too few.",
        "See the run file's `[data]`, and `--data` on this machine.",
        ("node.tokens.DataError",),
    ),
    ExitCode(
        16,
        "bad-checkpoint",
        "a checkpoint cannot be written, read or exported.",
        "Free some space or name another folder with `--save`; `--resume` takes a folder of `--save` of the "
        "same run.",
        ("node.checkpoint_meta.CheckpointError", "node.export.ExportError"),
    ),
    ExitCode(
        17,
        "bad-journal",
        "the coordinator's folder is of another run, in use, damaged, or cannot be written.",
        "The message says which; another folder with `--journal` begins the run anew.",
        ("coordinator.journal.JournalError", "coordinator.chunk_store.ChunkStoreError"),
    ),
    ExitCode(
        18,
        _LAUNCH,
        "a node, its ranks or other processes could not be started, or have failed.",
        "The message names the process; its own lines before say why.",
        (
            "node.setting.LaunchError",
            "deploy.processes.ProcessError",
            "node.island.transfer.IslandError",
            "node.ranks.RankError",
        ),
    ),
    ExitCode(
        19,
        "bad-token-book",
        "`tokens.json` in the coordinator's folder cannot be read, or not be changed as wanted.",
        "For a name, see `atoll invite list DIR`. Bring a damaged file back, or remove it: all invites are "
        "void then, and `atoll invite create DIR` makes new ones.",
        ("coordinator.tokens.TokenError",),
    ),
    ExitCode(
        20,
        "bad-token",
        "the coordinator does not know the token of the invite.",
        "Ask for a new invite. It may be of another run, or its token was replaced.",
        refusals=(refusal.BAD_TOKEN,),
    ),
    ExitCode(
        21,
        "token-expired",
        "the token of the invite was valid for some time, which is over.",
        "Ask for a new invite; its maker gives `--expires` a longer time.",
        refusals=(refusal.TOKEN_EXPIRED,),
    ),
    ExitCode(
        22,
        "token-revoked",
        "the token of the invite was revoked. A node that came with it has been put out of the run.",
        "Ask whoever runs the coordinator why; a new invite is of no use before that.",
        refusals=(refusal.TOKEN_REVOKED,),
    ),
    ExitCode(
        23,
        "wrong-role",
        "the token is for something else: an observer cannot join, a node gives no orders.",
        "Ask for an invite of that role (`atoll invite create DIR --role ROLE`).",
        refusals=(refusal.WRONG_ROLE,),
    ),
    ExitCode(
        24,
        "wrong-pin",
        "who answers at the address has not got the certificate that the invite names: it is another "
        "coordinator, a new one on the same port, or somebody in between. No token was sent.",
        "Ask for a new invite by a way that you trust, and compare. Do not go on if nobody has changed "
        "anything.",
        refusals=("wrong-pin",),
    ),
    ExitCode(
        25,
        "tls-refused",
        "both sides could not agree on TLS: the coordinator wants a certificate of this node, does not "
        "accept the one that is shown, or speaks TLS where the invite says that it does not.",
        "Give `--tls-cert`, `--tls-key` and `--tls-ca` as the coordinator's owner says, or ask for a new "
        "invite.",
        ("protos.certificate.CertificateError",),
        ("tls-refused",),
    ),
    ExitCode(
        26,
        "tls-downgraded",
        "the invite asks for TLS, and what answers does not speak it: something else listens there, or "
        "somebody on the way wants to read. No token was sent.",
        "Check the port, and whether a proxy stands in between. A coordinator with `--insecure` gives "
        "invites that begin with `atoll+insecure://`.",
        refusals=("tls-downgraded",),
    ),
    ExitCode(
        27,
        "replayed-join",
        "a join was used before: what lets a node in is good for once.",
        "Start `atoll join` again. If that does not help, somebody repeats what your node sends: use TLS.",
        refusals=(refusal.REPLAYED_JOIN,),
    ),
    ExitCode(
        28,
        "key-in-use",
        "another process is in the run with this node's key, or holds its file.",
        "End the other one; one that lost its power is given up after the run's heartbeats. Give every node "
        "a key of its own with `--identity`, and never copy one. If somebody has copied yours, remove the "
        "file, and have that node expelled.",
        refusals=(refusal.KEY_IN_USE,),
    ),
    ExitCode(
        29,
        "bad-identity",
        "the key file of this node is damaged, can be read by others, or cannot be written; or key and "
        "signature do not fit.",
        "`chmod 600` the file, or remove it: the node gets a new identity.",
        ("node.key_file.KeyFileError",),
        (refusal.BAD_IDENTITY,),
    ),
    ExitCode(
        30,
        "old-version",
        "node and coordinator speak different protocols.",
        "Install the newer wheel, or update the checkout, where the message says that it is too old.",
        refusals=(refusal.OLD_VERSION,),
    ),
    ExitCode(
        31,
        _EXCHANGE,
        "the coordinator is not there, does not answer, or is gone for good; or an answer breaks the "
        "protocol.",
        "`atoll doctor INVITE` tries the way there, and says what to do. `--wait` makes a node wait longer.",
        (
            "node.exchange.base.ExchangeError",
            "protos.tls.ConnectError",
            "deploy.status.StatusError",
        ),
    ),
    ExitCode(
        32,
        "join-refused",
        "the run does not take this node: its run file, model, data, dtype or state is not the run's, or the "
        "run has ended or is full.",
        "The message names both values. Join with the run's invite and no edited run file, the same text, "
        "and the same version of Atoll.",
        refusals=(refusal.JOIN,),
    ),
    ExitCode(
        33,
        "expelled",
        "this node was expelled from the run.",
        "Ask whoever runs the coordinator; the reason is in the message.",
        refusals=(refusal.EXPELLED,),
    ),
    ExitCode(
        34,
        "refused",
        "the coordinator did not take what this node sent: it was damaged, too much, too often, or of "
        "another round or session.",
        "Start `atoll join` again; if it comes back, compare the versions of Atoll, and report it.",
        refusals=(
            refusal.TRUNCATED,
            refusal.OVERSIZED,
            refusal.OUT_OF_ORDER,
            refusal.BAD_FRAME,
            refusal.BAD_DIGEST,
            refusal.BAD_WEIGHT,
            refusal.WRONG_TABLE,
            refusal.WRONG_ROUND,
            refusal.NOT_FINITE,
            refusal.BAD_CODE,
            refusal.BAD_LANE,
            refusal.WRONG_SLICE,
            refusal.NOT_A_MEMBER,
            refusal.DUPLICATE,
            refusal.LATE,
            refusal.BAD_SESSION,
            refusal.SECOND_SESSION,
            refusal.BAD_MESSAGE,
            refusal.BAD_TRANSFER,
            refusal.STALLED,
            refusal.REPLACED,
            refusal.BROKEN,
            refusal.DIGEST_MISMATCH,
            refusal.FELL_BEHIND,
            refusal.NOT_KEPT,
            refusal.OVERLOADED,
            refusal.FLOOD,
            refusal.SILENT,
            refusal.CROWDED,
            refusal.TUNNEL,
        ),
    ),
    ExitCode(
        INTERRUPTED, "interrupted", "Ctrl-C (SIGINT) has ended it, in order.", "Start it again to go on."
    ),
    ExitCode(143, "terminated", "SIGTERM has ended it, in order.", "Start it again to go on."),
)

OF_ERROR: Final = {error: code for code in CODES for error in code.errors}
OF_REFUSAL: Final = {kind: code for code in CODES for kind in code.refusals}
SYSTEM: Final = next(code for code in CODES if code.name == _SYSTEM)
NOT_LAUNCHED: Final = next(code for code in CODES if code.name == _LAUNCH)


_HEAD: Final = """# Errors and exit codes

`atoll` ends with 0 if all went well, and with one of these codes else. What is wrong, where, and what to do
is in the last line on stderr; `--debug` adds the traceback.

| code | name | meaning |
|---|---|---|
"""


def markdown() -> str:
    """The page on exit codes."""
    rows = "".join(f"| {one.code} | [{one.name}](#{one.name}) | {one.when} |\n" for one in CODES)
    return f"{_HEAD}{rows}\n" + "\n".join(_section(one) for one in CODES)


def _section(one: ExitCode) -> str:
    text = f"## {one.name}\n\nExit code {one.code}: {one.when}\n\n{one.cure}\n"
    named = [f"`{error.rpartition('.')[2]}`" for error in one.errors] + [f"`{kind}`" for kind in one.refusals]
    return text + (f"\nErrors and refusals: {', '.join(named)}.\n" if named else "")


if __name__ == "__main__":
    print(markdown(), end="")
