"""The time of a training step on GPUs that are not there. An estimate, no measurement.

time = launches x launch cost + max(bytes / bandwidth, FLOPs / rate)     for each op; the lecture's model

lightseq-report estimate --lecture      the lecture's own figures beside what this model gives for them
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lecture", action="store_true", help="the lecture's figures beside this model's")


def run(args: argparse.Namespace) -> int:
    from ls_plugin.report import lecture, roofline

    for gpu in roofline.GPUS.values():
        print(f"{gpu.name}: launch {1e6 * gpu.launch_s:g} us, {gpu.bytes_per_s / 1e12:g} TB/s; {gpu.source}")
    if args.lecture:
        for figure in lecture.figures():
            print(f"{figure.name}: lecture {figure.lecture:,g}{figure.unit}, model {figure.model:,.4g}{figure.unit}")
    return 0
