"""Photos to answers, with what the device knows.

`knowledge` reads what is known from a state directory; `predictor` answers;
`camera_answers` does so for the client's own camera, and keeps the photos;
`int8_answers` answers by a form in int8, where it serves;
`class_shares` counts what the device sees; `suggestions` says which photos to name, `photos_to_name` which kept
ones, and `label_report` whether enough are named;
`answer_publisher` sends answers to a broker, where that is asked for.
"""
