"""The bill of a group of devices: one way, one board, one radio, so many rounds a day.

Of one device:

    traffic      round × rounds a day + pings, or connections                       bytes on the wire, up and down
    sending_s    up / up rate + down / down rate + the radio's wake                  of a round
    round_s      computing_s + sending_s
    joules a day base · 86,400 s                                                     waiting, or asleep
                 + computing_s · (active − base) + sending_s · (waiting − base)      each round
                 + the radio: W · s while it sends and receives, wake and tail       each round, ping and connection
    battery_days Wh · 3,600 / joules a day

and of the group a month (365.25 / 12 days): megabytes; money for data, for electricity (joules, batteries' too), and
for boards (price over months in service).

Every figure has bounds: of the latency model's interval, of the board's watts, of the user's figures. Bounds are added,
for a model errs alike on all devices. A figure whose ground is missing is None, and so is all that is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.plan.device_work import DeviceWork, WayWork
from protofleet.hw_profiles.plan.figures import Figures
from protofleet.hw_profiles.plan.fleet_file import Fleet, Group, Radio
from protofleet.hw_profiles.plan.wire_bytes import Traffic, connection_traffic, keepalive_traffic, round_traffic
from protofleet.hw_profiles.ranges import ONE, Range

__all__ = ["DAYS_A_MONTH", "Bill", "bill"]

DAYS_A_MONTH = 365.25 / 12
_DAY_S = 86_400.0


@dataclass(frozen=True)
class Bill:
    """What one group costs with one choice; `device_*` are of one device.

    Attributes:
        gaps: why a figure is None, in words.
        traffic_a_day: of one device.
        money_*: a month, of the group.
    """

    group: Group
    board: Device
    radio: Radio
    rounds_a_day: float
    work: DeviceWork
    round_s: Range | None
    joules_a_round: Range | None
    joules_a_day: Range | None
    battery_days: Range | None
    traffic_a_round: Traffic
    traffic_a_day: Traffic
    megabytes_a_month: Range
    money_data: Range
    money_boards: Range
    money_electricity: Range | None
    gaps: tuple[str, ...] = field(default=())

    @property
    def money(self) -> Range | None:
        """A month, of the group; None where a part is not known."""
        if self.money_electricity is None:
            return None
        return self.money_data.plus(self.money_boards).plus(self.money_electricity)

    @property
    def fits_the_day(self) -> bool | None:
        """Whether a round ends before the next begins, even at its upper bound; None where nobody knows."""
        return None if self.round_s is None else self.round_s.high <= _DAY_S / self.rounds_a_day


@dataclass(frozen=True)
class _Watts:
    active: Range
    waiting: Range
    base: Range


def bill(fleet: Fleet, way: WayWork, group: Group, board: Device, radio: Radio, rounds_a_day: float) -> Bill:
    """The bill of this choice."""
    work = way.on(board, fleet.samples)
    own = fleet.boards.get(board.name, Figures())
    one_round = round_traffic(way.manifest, way.method)
    connection = connection_traffic(way.manifest, way.method)
    keepalive = min(fleet.keepalive_s, _DAY_S)
    if fleet.stays_connected:
        day = Traffic().plus(one_round, rounds_a_day).plus(connection, fleet.connections_a_day)
        day = day.plus(keepalive_traffic(keepalive, _DAY_S))
    else:
        one_round = one_round.plus(connection)
        day = Traffic().plus(one_round, rounds_a_day)
    sending = _sending(one_round, radio)
    watts, gaps = _watts(fleet, board, own)
    round_s = None if work.seconds is None else work.seconds.plus(sending)
    joules_round = joules_day = battery = None
    if work.seconds is not None and watts is not None:
        radio_round = _radio_joules(one_round, radio, radio.figures.get("tail_s"))
        joules_round = watts.active.times(work.seconds).plus(watts.waiting.times(sending)).plus(radio_round)
        extra = _above(watts.active, watts.base).times(work.seconds)
        extra = extra.plus(_above(watts.waiting, watts.base).times(sending)).plus(radio_round)
        joules_day = watts.base.scaled(_DAY_S).plus(extra, rounds_a_day).plus(_idle_radio(fleet, way, radio, keepalive))
        if group.battery_wh is not None and joules_day.low > 0:
            battery = group.battery_wh.scaled(3600.0).over(joules_day)
        elif group.battery_wh is not None:
            gaps = (f"{board.name} may draw nothing all day: the low of boards.{board.name}.asleep_w",)
    electricity = None
    if joules_day is not None:
        kilowatt_hours = joules_day.scaled(DAYS_A_MONTH * group.count / 3.6e6)
        electricity = kilowatt_hours.times(fleet.prices.get("electricity_kwh"))
    megabytes = day.both.scaled(DAYS_A_MONTH * group.count / 1e6)
    return Bill(
        group=group,
        board=board,
        radio=radio,
        rounds_a_day=rounds_a_day,
        work=work,
        round_s=round_s,
        joules_a_round=joules_round,
        joules_a_day=joules_day,
        battery_days=battery,
        traffic_a_round=one_round,
        traffic_a_day=day,
        megabytes_a_month=megabytes,
        money_data=megabytes.times(radio.figures.get("price_mb")).plus(
            radio.figures.get("price_month").scaled(group.count)
        ),
        money_boards=own.get("price").scaled(group.count).over(fleet.prices.get("board_months")),
        money_electricity=electricity,
        gaps=(*(work.reasons if work.seconds is None else ()), *gaps),
    )


def _watts(fleet: Fleet, board: Device, own: Figures) -> tuple[_Watts | None, tuple[str, ...]]:
    """The whole board's watts while it computes, waits, and between rounds."""
    power = board.power
    if power is None:
        return None, (f"the file of {board.name} gives no power",)
    idle = own.values.get("idle_w")
    if idle is None and power.idle_w is not None:
        idle = Range(power.idle_w, power.idle_w, power.idle_w)
    if idle is None:
        return None, (f"no idle power of {board.name}: boards.{board.name}.idle_w",)
    active = Range(sqrt(power.active_low_w * power.active_high_w), power.active_low_w, power.active_high_w)
    base = idle if fleet.stays_connected else own.values.get("asleep_w")
    if base is None:
        return None, (f"no power of {board.name} asleep: boards.{board.name}.asleep_w",)
    return _Watts(active, idle, base), ()


def _above(watts: Range, base: Range) -> Range:
    """What is drawn beyond `base`, whose own uncertainty is counted with the base."""
    return Range(*(max(0.0, w - base.value) for w in (watts.value, watts.low, watts.high)))


def _sending(traffic: Traffic, radio: Radio) -> Range:
    """Seconds on the air of one round."""
    return (
        _airtime(traffic.up, radio, "up").plus(_airtime(traffic.down, radio, "down")).plus(radio.figures.get("wake_s"))
    )


def _airtime(size: Range, radio: Radio, direction: str) -> Range:
    return size.scaled(8e-6).over(radio.figures.get(f"{direction}_mbit_s"))


def _radio_joules(traffic: Traffic, radio: Radio, tail_s: Range, wakes: Range = ONE) -> Range:
    """Of one exchange: the wake, the bytes, and the tail in which the radio listens on.

    Args:
        wakes: 0 where the radio is awake already.
    """
    get = radio.figures.get
    joules = get("wake_w").times(get("wake_s")).times(wakes).plus(get("tail_w").times(tail_s))
    joules = joules.plus(get("up_w").times(_airtime(traffic.up, radio, "up")))
    return joules.plus(get("down_w").times(_airtime(traffic.down, radio, "down")))


def _idle_radio(fleet: Fleet, way: WayWork, radio: Radio, keepalive_s: float) -> Range:
    """A day of pings and connections.

    A ping within the tail of the last finds the radio awake, and ends that tail: the promotion is from idle alone, and
    activity starts the tail's timer anew (the states of Huang et al., MobiSys 2012, whose figures the defaults are).
    """
    standing = radio.figures.get("idle_w").scaled(_DAY_S)
    if not fleet.stays_connected:
        return Range()
    tail = radio.figures.get("tail_s")
    ends = (tail.value, tail.low, tail.high)
    within = Range(*(min(seconds, keepalive_s) for seconds in ends))
    asleep = [float(seconds < keepalive_s) for seconds in ends]
    wakes = Range(asleep[0], min(asleep), max(asleep))
    ping = _radio_joules(keepalive_traffic(keepalive_s, keepalive_s), radio, within, wakes)
    connection = _radio_joules(connection_traffic(way.manifest, way.method), radio, tail)
    return standing.plus(ping, _DAY_S / keepalive_s).plus(connection, fleet.connections_a_day)
