"""The command `protofleet helper`: options in, a line for each set, an exit code out."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from protofleet.aggregator.helper.ledger import Ledger
from protofleet.aggregator.helper.opening import Helper
from protofleet.aggregator.helper.process import HelperServer
from protofleet.aggregator.helper.settings import HelperSettings
from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.console import logs
from protofleet.contract.console.interrupt import Terminated, interruptible
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.identity.signing_keys import read_public_keys
from protofleet.contract.printable import counted
from protofleet.contract.privacy.openable_sets import smaller
from protofleet.contract.privacy.sealing import make_helper_key, read_helper_key
from protofleet.contract.settings.command_line import command_of

__all__ = ["helper_command"]

logger = logging.getLogger(__name__)


@command_of(HelperSettings)
def helper_command(settings: HelperSettings) -> int:
    """Open the sums of blinded rounds, and nothing else: run it where the aggregator's operator has no access."""
    logs.set_up(settings.log_format, quiet=settings.quiet, fleet=settings.fleet)
    if settings.new_key is not None:
        make_helper_key(Path(settings.new_key))
        public = f"{settings.new_key}.pub"
        logger.info(
            f"{settings.new_key} is the helper's alone; {public} is for aggregate --helper and each client --helper-key"
        )
        return 0
    key, listed, fleet, least = Path(settings.key), Path(settings.devices), settings.fleet, settings.least
    private = read_helper_key(key)
    count = len(read_allowlist(listed))
    waits = "" if count >= least else "; nothing is opened before the list has as many"
    logger.info(f"{counted(count, 'device')} enrolled, no sum over fewer than {least} of them is opened{waits}")
    trusted = None if settings.trust is None else Keyring(read_public_keys(settings.trust))
    public_key = private.public.seal
    with Ledger(Path(settings.store), fleet=fleet, key=public_key, witness=Witness(key, fleet, public_key)) as ledger:
        few = smaller(ledger.blocks, least)
        if few:
            logger.info(
                f"{counted(few, 'device')} that earlier sums show among fewer than {least} can be summed no more"
            )
        server = HelperServer(
            Helper(ledger, private, fleet, lambda: read_allowlist(listed), least),
            Signer(private.sign),
            settings.address,
            fleet,
            trusted=trusted,
            stopping=threading.Event(),
            manager=ServiceManager(),
        )
        try:
            with interruptible(terminable=True):
                server.run()
        except (Terminated, KeyboardInterrupt) as signal:
            logger.info(f"stopped: what was opened is in {settings.store}")
            return 143 if isinstance(signal, Terminated) else 130
    return 0
