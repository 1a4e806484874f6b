# SPDX-License-Identifier: Apache-2.0
"""`anyaccel port`: code written for `torch.cuda` made to run on any accelerator; needs LibCST, never torch."""
