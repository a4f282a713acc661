"""Who may speak: `gate` checks devices' keys, `signed_publisher` signs the aggregator's messages."""
