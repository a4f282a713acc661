"""A fleet's bill before it is bought: `protofleet plan`.

The data flow, and the modules along it:

    fleet.toml         →  groups, ways, goal     `fleet_file`, with `figures`; defaults.toml and example.toml lie here
    bundle and method  →  seconds of a round     `device_work`: the latency model's, with bounds and support
                       →  bytes on the wire      `wire_bytes`: payloads, and what a real broker made of such
    all of it          →  one group's bill       `bill`
                       →  the cheapest choice    `choice`
                       →  a report               `report` as values, `plan_page` as a page, `wording` of the figures

docs/plan.md tells how to use it.
"""
