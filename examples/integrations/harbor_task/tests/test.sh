#!/bin/bash
# The reward is a file: 1 where the names are there in order, else 0.
if [ "$(cat /app/names.txt)" = "$(printf 'apples\nplums\npears')" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
