# SPDX-License-Identifier: Apache-2.0
# What is built from the public header alone links the library beside it.
USER_LD = $(CFLAGS) $(LDFLAGS) -pie -Wl,-rpath,'$$ORIGIN'
