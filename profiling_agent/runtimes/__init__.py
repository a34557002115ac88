"""Runtimes and saved models: conversion of float32 models, saving, checking and opening without pickle."""
