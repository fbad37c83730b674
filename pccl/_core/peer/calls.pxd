# What a peer knows of the votes of its training process; the bodies are in calls.pyx.

cdef class Calls:
    cdef readonly dict open               # call name -> Call under way
    cdef object next_number               # numbers this peer's votes
    cdef list actions                     # of the event being handled

    cdef begin(self, list actions)
