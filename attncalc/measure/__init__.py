"""Estimate beside measurement: real layers on the user's device.

`plan` says what is measured and what is predicted, without torch; `hardware` knows the device: timer, memory, peaks;
`run` builds the layers and puts both side by side.
"""
