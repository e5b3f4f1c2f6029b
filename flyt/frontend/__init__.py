# SPDX-License-Identifier: Apache-2.0
"""The application's side: one session a process, its tables, its transfers, the API's faces."""
