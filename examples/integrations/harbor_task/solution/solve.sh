#!/bin/bash
sort -n stock.txt | cut -d " " -f 2 > names.txt
